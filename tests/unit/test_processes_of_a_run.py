"""A run's processes are known by their mark: their stacks are read, and none is left."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from marl.cluster import processes, stacks
from marl.cluster.failures import GroupFailed, GroupHung
from marl.cluster.processes import end_left, end_orphans
from marl.utils import endings, run_mark, segments
from marl.utils.deadlines import DeadlinePassed
from marl.utils.endings import Terminated, ended_by_sigterm, interrupted_at_once
from marl.utils.run_mark import MARK, marked, new_mark, own_name, owner_lives

LISTENS = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)\n"
HANGS = "def waits_for_ever():\n  import time; print(1, flush=True); time.sleep(60)\nwaits_for_ever()"


@pytest.fixture
def spawn(tmp_path):
    """Start Python on some code; with ``orphan``, from a shell that is gone at once."""
    started = []

    def spawn(code, mark, orphan=False):
        log = open(tmp_path / f"{len(started)}.err", "w")  # noqa: SIM115 - the process keeps it
        command = [sys.executable, "-c", code]
        command = ["sh", "-c", '"$@" & echo $!; wait $!' if not orphan else '"$@" & echo $!', "sh", *command]
        shell = subprocess.Popen(command, env=os.environ | {MARK: mark}, stdout=subprocess.PIPE, stderr=log, text=True)
        process = psutil.Process(int(shell.stdout.readline()))
        said = shell.stdout.readline()
        # a run of the tests beside these may have ended a dead driver's process
        assert said == "1\n" or not owner_lives(mark)
        started.extend([process, shell])
        return process

    yield spawn
    for process in started:
        if isinstance(process, subprocess.Popen) or process.is_running():
            process.kill()


def gone(process):
    return psutil.wait_procs([process], timeout=5)[1] == []


def test_a_mark_tells_whether_its_driver_lives():
    assert owner_lives(new_mark()) and new_mark() != new_mark()
    where, pid, start = own_name().rsplit("/", 2)
    assert not owner_lives(f"{where}/{pid}/1{start}/abc"), "another process had this number"
    assert owner_lives(f"elsewhere/{where.partition('/')[2]}/1/1/abc"), "another host's driver cannot be seen from here"


def test_a_host_of_the_same_name_is_another(monkeypatch, tmp_path):
    """Every machine's first pid namespace has the same number."""
    mark, boot = new_mark(), tmp_path / "boot_id"
    gone = mark.replace(f"/{os.getpid()}/", "/0/")
    assert not owner_lives(gone)
    boot.write_text("another-boot\n")
    monkeypatch.setattr(run_mark, "BOOT", boot)
    assert owner_lives(gone) and new_mark().count("/") == mark.count("/")


def test_the_mark_lasts_as_long_as_the_session(monkeypatch):
    monkeypatch.setenv(MARK, "outer")
    with marked() as mark:
        assert os.environ[MARK] == mark != "outer"
    assert os.environ[MARK] == "outer"


def test_hung_processes_tell_where_they_are_and_a_stopped_one_is_named(spawn, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_S", 20.0)  # a busy machine takes its time
    with marked() as mark:
        hung, stopped, deaf = spawn(LISTENS + HANGS, mark), spawn(LISTENS + HANGS, mark), spawn(HANGS, mark)
        stopped.suspend()
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(DeadlinePassed) as late, stacks.stacks_of_a_hang(tmp_path):
            raise DeadlinePassed("update did not end")
    assert time.monotonic() - began < stacks.ANSWER_S, "nobody waits for a process that is stopped"
    (note,) = late.value.__notes__
    (folder,) = (tmp_path / "stacks").iterdir()
    assert note == f"stacks of all processes: {folder}"
    told = {path.stem.rpartition("_")[2]: path.read_text() for path in folder.iterdir()}
    assert told.keys() == {str(pid) for pid in (os.getpid(), hung.pid, stopped.pid, deaf.pid)}
    assert "waits_for_ever" in told[str(hung.pid)] and "test_hung_processes" in told[str(os.getpid())]
    assert "state: stopped" in told[str(stopped.pid)] and "does not listen" in told[str(deaf.pid)]
    assert deaf.is_running(), "the signal would have ended it"


@pytest.mark.parametrize("error,dumped", [(GroupHung("late"), True), (GroupFailed("raised"), False)])
def test_only_a_hang_is_asked_for_its_stacks(tmp_path, error, dumped):
    with pytest.raises(GroupFailed), stacks.stacks_of_a_hang(tmp_path):
        raise error
    assert (tmp_path / "stacks").exists() is dumped


def test_what_a_session_left_is_ended_and_nobody_elses(spawn, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_S", 0.2)
    mine, other = new_mark(), new_mark()
    left, stopped, others = (
        spawn(HANGS, mine, orphan=True),
        spawn(HANGS, mine, orphan=True),
        spawn(HANGS, other, orphan=True),
    )
    child = spawn(HANGS, mine)
    stopped.suspend()
    end_left(mine)
    assert gone(left) and gone(stopped)
    assert others.is_running() and child.is_running(), "a tracker that this process started ends by itself"


def test_an_orphan_that_became_a_child_is_ended_too(monkeypatch):
    """As all orphans do where the driver is a container's first process."""
    monkeypatch.setattr(processes, "PATIENCE_S", 0.2)
    mine = new_mark()
    child, orphan = (
        subprocess.Popen([name, "60"], executable=shutil.which("sleep"), env=os.environ | {MARK: mine})
        for name in ("sleep", "ray::PolicyWorker")
    )
    try:
        end_left(mine)
        assert orphan.wait(5) == -signal.SIGKILL and child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_dead_drivers_processes_are_ended_by_the_next_run(spawn, tmp_path, monkeypatch):
    where, pid, start = own_name().rsplit("/", 2)
    dead, alive = spawn(HANGS, f"{where}/{pid}/9{start}/abc", orphan=True), spawn(HANGS, new_mark(), orphan=True)
    monkeypatch.setattr(segments, "NOTES", tmp_path / "notes")
    monkeypatch.setattr(processes, "SESSIONS", tmp_path / "ray")
    end_orphans()
    assert gone(dead) and alive.is_running()


def test_sockets_of_dead_sessions_are_removed(monkeypatch, tmp_path):
    """One of three still has a listener, and one was made just now."""
    monkeypatch.setattr(processes, "SESSIONS", tmp_path)
    listeners = {name: listener(tmp_path / f"session_{name}" / "sockets") for name in ("dead", "alive", "young")}
    for name in ("dead", "young"):
        listeners[name].close()
    for name in ("dead", "alive"):
        os.utime(tmp_path / f"session_{name}" / "sockets" / "raylet", (0, 0))
    end_orphans()
    assert {path.parent.name for path in tmp_path.glob("*/sockets")} == {"session_alive", "session_young"}
    listeners["alive"].close()


def listener(folder):
    folder.mkdir(parents=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(folder / "raylet"))
    made.listen()
    return made


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "background"])
def test_sigterm_ends_a_run_in_order(ignored):
    before, ended = signal.getsignal(signal.SIGTERM), []
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)

    async def run():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            await asyncio.sleep(5)
        finally:
            ended.append("stopped")

    try:
        with pytest.raises(Terminated), ended_by_sigterm():
            asyncio.run(run())
        with pytest.raises(KeyboardInterrupt) as pressed, ended_by_sigterm():
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert ended == ["stopped"] and type(pressed.value) is KeyboardInterrupt
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("ends", [True, False])
def test_sigterm_ends_a_run_whose_loop_is_blocked(monkeypatch, ends):
    """As by a reward function, runner or tool that hangs without await. One that only ends slowly is not interrupted again."""
    monkeypatch.setattr(endings, "GRACE_S", 0.2)
    ended, began = [], time.monotonic()

    async def run():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            await asyncio.sleep(10) if ends else time.sleep(10)
        finally:
            ended.append(await asyncio.sleep(0.5 * ends, "in order"))

    with pytest.raises(Terminated), ended_by_sigterm():
        asyncio.run(run())
    assert time.monotonic() - began < 5 and (ended or not ends)


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C, which a shell's job in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_sigterm_ends_a_wait_that_holds_the_event_loop(interruptible):
    """asyncio only marks its task as cancelled: a library that waits by itself would not notice."""
    before, reached = signal.getsignal(signal.SIGINT), []

    async def run():
        handler = signal.getsignal(signal.SIGINT)
        try:
            with interrupted_at_once():
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
                time.sleep(2)
                reached.append("the end of the wait")
        finally:
            assert signal.getsignal(signal.SIGINT) is handler

    with pytest.raises(Terminated), ended_by_sigterm():
        asyncio.run(run())
    assert not reached and signal.getsignal(signal.SIGINT) is before
