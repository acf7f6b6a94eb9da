"""Checkpoints of which a rank's part is never written: the disk is full, or the rank has died."""

import asyncio
import builtins
import errno
import io
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from marl import checkpoint
from marl.checkpoint import Kept
from marl.cluster.failures import GroupFailed
from marl.cluster.workers import shard_files
from marl.cluster.workers.adapter_worker import AdapterWorker
from marl.cluster.workers.critic_worker import CriticWorker
from marl.cluster.workers.policy_worker import PolicyWorker
from marl.config.deadlines import Deadline
from marl.utils import background, folders, manifest, marks
from marl.utils.background import Background
from marl.utils.deadlines import DeadlinePassed

PATIENT = Deadline(5.0, "resources.save_timeout_s")
SPACE = 64 * 1024
NONE = Kept(None, 0, "")


@pytest.fixture
def full(tmp_path, monkeypatch):
    """Writing of a file until the disk is full; then no file is begun, until another one is removed."""
    usual = builtins.open

    def used():
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    def no_space():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def checked(path, mode="r", *arguments, **settings):
        begins = not isinstance(path, int) and tmp_path in Path(path).parents and not Path(path).exists()
        if begins and mode[0] in "wxa" and used() >= SPACE:
            no_space()
        return usual(path, mode, *arguments, **settings)

    def fill(path):
        with usual(path, "wb") as file:
            file.write(b"x" * SPACE)
        no_space()

    monkeypatch.setattr(builtins, "open", checked)
    monkeypatch.setattr(io, "open", checked)
    return fill


@pytest.mark.parametrize("filled_by", [0, 1])
def test_a_full_disk_is_the_runs_error_at_once_and_holds_no_half(tmp_path, full, filled_by):
    """Space that a rank gives back may be another's at once: its mark has its own."""
    folder = folders.begin(tmp_path, 1)
    part = folder / "alice" / "actor"
    (part / "huggingface").mkdir(parents=True)
    (part / "huggingface" / "config.json").write_text("{}")
    (part / "model_rank_0.pt").touch()
    shard_files.write(part, 0, [partial(full, part / f"optim_rank_{filled_by}.pt")])
    shard_files.THREAD.submit(int).result()
    others = {"optim_rank_1.pt"} if filled_by == 1 else set()
    assert {path.name for path in part.iterdir()} == {".written_rank_0", *others}
    began = time.monotonic()
    with pytest.raises(OSError, match=r"alice/actor.*: with \d+ MiB free there, OSError:.*No space left on device"):
        checkpoint.finish(folder, {}, {"step": 1}, marks.marks_of(part, 2)[::-1], PATIENT, NONE)
    assert time.monotonic() - began < 1.0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [PolicyWorker.update_actor, AdapterWorker.update_actor, CriticWorker.update_critic])
def test_an_error_that_no_mark_tells_is_raised_by_the_next_update(tmp_path, monkeypatch, call):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shard_files, "leave", broken)
    shard_files.write(tmp_path, 0, [lambda: 1 / 0])
    shard_files.THREAD.submit(int).result()
    with pytest.raises(OSError, match="rank 0: .*ZeroDivisionError: division by zero, and no mark.*Input/output error"):
        call(SimpleNamespace(), None)
    shard_files.raise_lost()


def test_a_rank_that_is_late_for_a_folder_that_was_given_up_disturbs_nobody(tmp_path):
    folder = folders.begin(tmp_path, 1)
    shard_files.write(folder, 0, [lambda: folders.clean(tmp_path)])
    shard_files.THREAD.submit(int).result()
    shard_files.raise_lost()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_no_longer_held_and_at_once_means_before_the_call_returns(tmp_path):
    class State:
        pass

    state, seen = State(), []
    gone = weakref.ref(state)
    jobs = [partial(id, state), lambda: seen.append(gone() is None)]
    del state
    shard_files.write(tmp_path, 0, jobs, beside=False)
    assert seen == [True] and (tmp_path / ".written_rank_0").exists()


async def run_that_fails(work):
    async with Background("a checkpoint") as saving:
        saving.start(work, saving.failing.is_set)
        await asyncio.sleep(0.05)
        raise RuntimeError("rank 1 died")


def finished(root, *ends):
    folder, expected = root / ".tmp_global_step_1", marks.marks_of(root / ".tmp_global_step_1", 2)
    checkpoint.finish(folder, {}, {"step": 1, "metrics": {}}, expected, PATIENT, NONE, *ends)


def test_a_rank_that_died_is_shown_before_its_part_is_given_up_and_soon(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(marks, "STILL_S", 0.1)
    marks.leave(folders.begin(tmp_path, 1), 0, "")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        asyncio.run(run_that_fails(partial(finished, tmp_path)))
    assert time.monotonic() - began < 2.0 and list(tmp_path.iterdir()) == []
    first, second = (record.message for record in caplog.records if record.levelno == logging.ERROR)
    assert "the run ends" in first and "RuntimeError: rank 1 died" in first
    assert "rank 1 has not written its part, and nothing was written for 0.1 s while the run was ending" in second


async def flushed_beside_a_death(work, after):
    began = time.monotonic()

    async def watch():
        if time.monotonic() - began > after:
            raise GroupFailed("rank 1 died")

    saving = Background("a checkpoint", watch)
    saving.start(work, saving.failing.is_set, saving.hopeless.is_set)
    await saving.flush()


def test_a_rank_that_dies_while_the_last_checkpoint_is_awaited_ends_it_at_once(tmp_path, monkeypatch):
    """Nothing else is asked of the ranks then: without a look at them the wait lasts until the deadline."""
    monkeypatch.setattr(background, "LOOK_S", 0.05)
    marks.leave(folders.begin(tmp_path, 1), 0, "")
    began = time.monotonic()
    with pytest.raises(GroupFailed, match="rank 1 died"):
        asyncio.run(flushed_beside_a_death(partial(finished, tmp_path), after=0.2))
    assert 0.2 < time.monotonic() - began < 2.0 and list(tmp_path.iterdir()) == []


def test_a_watch_that_sees_nobody_die_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "LOOK_S", 0.01)
    folder = folders.begin(tmp_path, 1)
    threading.Timer(0.2, lambda: [marks.leave(folder, rank, "") for rank in (0, 1)]).start()
    asyncio.run(flushed_beside_a_death(partial(finished, tmp_path), after=60.0))
    assert folders.named(tmp_path) == [(1, tmp_path / "global_step_1")]


def test_ranks_that_still_write_are_waited_for_though_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(marks, "STILL_S", 0.2)
    folder = folders.begin(tmp_path, 1)
    marks.leave(folder, 0, "")

    def slowly():
        with open(folder / "model_rank_1.pt", "wb", buffering=0) as file:
            for _ in range(12):
                time.sleep(0.05)
                file.write(b"x")

    shard_files.write(folder, 1, [slowly])
    with pytest.raises(RuntimeError, match="rank 1 died"):
        asyncio.run(run_that_fails(partial(finished, tmp_path)))
    assert (tmp_path / "global_step_1" / "model_rank_1.pt").stat().st_size == 12


def grow(path, seconds):
    with open(path, "wb", buffering=0) as file:
        for _ in range(int(seconds / 0.05)):
            time.sleep(0.05)
            file.write(b"x")


@pytest.mark.slow
def test_a_disk_that_is_only_slow_is_waited_for_beyond_the_deadline(tmp_path, caplog):
    folder = folders.begin(tmp_path, 1)
    shard_files.write(folder, 0, [partial(grow, folder / "model_rank_0.pt", 1.5)])
    marks.wait_for(marks.marks_of(folder, 1), 0.4, "resources.save_timeout_s")
    assert (folder / "model_rank_0.pt").stat().st_size == 30
    assert caplog.text.count("its files still grow, and are waited for") == 1


def test_a_disk_that_stands_still_is_given_up_soon_after_the_deadline(tmp_path):
    folder, ends = folders.begin(tmp_path, 1), threading.Event()
    shard_files.write(folder, 0, [partial(grow, folder / "model_rank_0.pt", 0.6), ends.wait])
    began = time.monotonic()
    try:
        with pytest.raises(
            TimeoutError, match=r"within 0.4 s, and nothing was written for \d s; .* raise resources.save_time"
        ):
            marks.wait_for(marks.marks_of(folder, 1), 0.4, "resources.save_timeout_s")
    finally:
        ends.set()
        shard_files.THREAD.submit(int).result()
    assert 0.9 < time.monotonic() - began < 5


def test_a_folder_is_removed_though_another_rank_still_writes_into_it(tmp_path):
    """One has failed, and the others find out by and by."""
    folder, begun, ends = tmp_path / "half", threading.Event(), time.monotonic() + 10
    folder.mkdir()
    for number in range(1000):
        (folder / f"part_{number}").touch()

    def writes():
        while folder.exists() and time.monotonic() < ends:
            with suppress(FileNotFoundError):
                (folder / "late").touch()
            begun.set()

    rank = threading.Thread(target=writes)
    rank.start()
    begun.wait(5)
    folders.remove(folder)
    assert not folder.exists()
    rank.join(20)


@pytest.fixture
def synced(monkeypatch):
    """Names of files that were brought to the disk, in order."""
    found, usual = [], os.fsync

    def fsync(descriptor):
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_the_metrics_up_to_a_step_are_on_the_disk_before_its_checkpoint_counts(tmp_path, synced):
    folders.begin(tmp_path, 1)
    (tmp_path / folders.METRICS).write_text("{}\n")
    checkpoint.finish(tmp_path / ".tmp_global_step_1", {}, {"step": 1}, [], PATIENT, NONE)
    assert synced.index(folders.METRICS) < synced.index(f".{manifest.MANIFEST}.tmp")


async def flushed(work, seconds):
    saving = Background("a checkpoint", None, seconds, "resources.save_timeout_s")
    saving.start(work, saving)
    await saving.flush()


HANGS = """
import asyncio, threading
from marl.utils.background import Background

async def main():
    saving = Background("a checkpoint", None, 0.2, "resources.save_timeout_s")
    saving.start(threading.Event().wait)
    await saving.flush()

asyncio.run(main())
"""


def test_a_seal_that_a_dead_disk_holds_is_given_up_and_one_that_gets_on_is_not():
    """Also at the end of the interpreter, which does not wait for the thread."""
    words = "nothing moved for 0.2 s while a checkpoint was written.*raise resources.save_timeout_s"
    with pytest.raises(DeadlinePassed, match=words):
        asyncio.run(flushed(lambda _: threading.Event().wait(), 0.2))

    def slow(saving):
        for _ in range(30):
            time.sleep(0.05)
            saving.move()

    asyncio.run(flushed(slow, 1.0))
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "DeadlinePassed: nothing moved" in done.stderr


def test_sealing_moves_with_every_piece_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE", 8)
    (tmp_path / "model.pt").write_bytes(bytes(80))
    moved = []
    manifest.seal(tmp_path, {"step": 1}, lambda: moved.append(1))
    assert len(moved) == 10


@pytest.mark.parametrize("held", ["sealing", "published"])
def test_a_save_that_was_given_up_touches_nothing_of_the_next_attempt(tmp_path, monkeypatch, held):
    """The disk comes back while the same step is saved again."""
    before = threading.enumerate()
    returns, saving = threading.Event(), Background("a checkpoint", None, 0.2, "resources.save_timeout_s")
    where, name = (manifest, "sync_folder") if held == "sealing" else (folders, "seal")
    usual = getattr(where, name)

    def hangs(*arguments):
        usual(*arguments)
        returns.wait()

    async def given_up():
        folders.begin(tmp_path, 1)
        monkeypatch.setattr(where, name, hangs)
        folder = tmp_path / ".tmp_global_step_1"
        saving.start(partial(checkpoint.finish, moves=saving.move), folder, {}, {"step": 1}, [], PATIENT, NONE)
        with pytest.raises(DeadlinePassed):
            await saving.flush()

    asyncio.run(given_up())
    monkeypatch.setattr(where, name, usual)
    (folders.begin(tmp_path, 1) / "of_the_next").touch()
    returns.set()
    (writer,) = (each for each in threading.enumerate() if each.name == "a_checkpoint" and each not in before)
    writer.join(10)
    assert [path.name for path in tmp_path.rglob("*")] == [".tmp_global_step_1", "of_the_next"]


async def watched_beside_a_hang():
    async def watch():
        raise GroupFailed("rank 1 died")

    saving = Background("a checkpoint", watch, 0.3, "resources.save_timeout_s")
    saving.start(threading.Event().wait)
    await saving.flush()


def test_a_disk_that_hangs_with_a_dead_rank_is_not_waited_for_either(monkeypatch):
    monkeypatch.setattr(background, "LOOK_S", 0.05)
    began = time.monotonic()
    with pytest.raises(GroupFailed, match="rank 1 died"):
        asyncio.run(watched_beside_a_hang())
    assert time.monotonic() - began < 5
