"""A run after a fault: what is built anew, how often, and from where; and what ends it."""

import asyncio
import errno
import json
import logging
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
    WorkerCrashedError,
)

from marl import build, main, recovery
from marl.build import ledger_is_foreign
from marl.cluster import launch
from marl.cluster.access import Unreachable
from marl.cluster.failures import (
    GroupFailed,
    GroupHung,
    GroupLost,
    StartFailed,
    WeightsNotArrived,
    can_be_mended,
    group_failed,
    is_a_hang,
)
from marl.cluster.pools import PlacementTimeout
from marl.config.errors import ConfigError
from marl.controller.collection import EpisodesFailed
from marl.preflight.run_folder import restarts_of
from marl.recovery import Recovery, TakeDown, to_go_on
from marl.utils.deadlines import DeadlinePassed, interrupted_after
from marl.utils.metrics import NotFinite
from marl.utils.process_time import process_seconds
from tests.builders import writing

TOLD = "policy 'alice' while computing update: process w (pid 7) died\n  its last lines: nothing"


def fault():
    return GroupLost(TOLD)


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """Let a recovery run attempts that do these things one after another; returns what each was given."""
    monkeypatch.setattr(recovery.Setup, "of", lambda config: SimpleNamespace(config=config))
    (tmp_path / "run.json").write_text(json.dumps({"config": {}}))

    def play(*does, most=3, progress=None, **trainer):
        settings = {"resume_mode": "auto", "resume_from_path": None, "resume_changes": []} | trainer
        config = OmegaConf.create({"resources": {"max_restarts": most}, "trainer": settings})
        given, does = [], list(does)

        def attempt(run):
            given.append((run.setup.config.trainer.resume_mode, run.again))
            ending = does.pop(0)
            for step in ending if isinstance(ending, list) else [ending]:
                if isinstance(step, Exception):
                    raise step
                run.note_step(step, 9, {})
            return f"attempt {len(given)}"

        run = Recovery(SimpleNamespace(config=config), tmp_path, progress)
        while True:
            try:
                return attempt(run), given
            except Exception as error:
                run.after(error)

    return play


def test_a_fault_is_followed_by_another_attempt_that_resumes(attempts, tmp_path, caplog):
    seen = []
    with caplog.at_level(logging.WARNING):
        ended, given = attempts(
            [1, 2, fault()], [2, 3], progress=lambda step, *_: seen.append(step), resume_mode="disable"
        )
    assert ended == "attempt 2" and given == [("disable", False), ("auto", True)] and seen == [1, 2, 2, 3]
    (said,) = [record.message for record in caplog.records]
    assert said == (
        "GroupLost: policy 'alice' while computing update: process w (pid 7) died. Restart 1 of 3 (resources.max_restarts), "
        f"from the start of {tmp_path}"
    )
    (noted,) = json.loads((tmp_path / "run.json").read_text())["restarted"]
    assert noted["from"] == f"the start of {tmp_path}" and noted["error"] == f"GroupLost: {TOLD}"
    assert restarts_of(tmp_path) == 1


def test_the_newest_checkpoint_is_named_and_halves_are_removed(attempts, tmp_path, caplog):
    for step in (2, 4):
        with writing(tmp_path, step):
            pass
    (tmp_path / ".tmp_global_step_6").mkdir()
    with caplog.at_level(logging.WARNING):
        attempts([fault()], [1])
    assert f"from {tmp_path / 'global_step_4'}" in caplog.text and not (tmp_path / ".tmp_global_step_6").exists()


def test_the_budget_counts_faults_without_progress(attempts):
    again = [[1, fault()] for _ in range(4)]
    with pytest.raises(GroupLost) as ended:
        attempts(*again, [1, 2])
    notes = " ".join(ended.value.__notes__)
    assert "resources.max_restarts=3: that many restarts made no progress" in notes
    assert "can be continued from the start of" in notes and "resume_mode=auto" in notes


def test_what_comes_of_a_fault_while_the_run_is_rebuilt_is_part_of_it(attempts):
    """The cluster has lost a node, and Ray is not back yet; the same errors of a first attempt, or of a later step, are not mended."""
    ended, given = attempts([1, fault()], [PlacementTimeout("no room")], [ConnectionError("no Ray")], [1, 2])
    assert ended == "attempt 4" and len(given) == 4
    for attempt in ([PlacementTimeout("no room")], [1, ConnectionError("a user's")]):
        with pytest.raises(type(attempt[-1])):
            attempts(attempt)


def test_an_exit_within_a_run_is_an_error_that_names_its_line():
    said = r"test_recovery.py, line \d+: sys.exit\(3\) was called"
    with pytest.raises(RuntimeError, match=said), main.exits_are_errors():
        sys.exit(3)


def test_a_process_that_cannot_be_made_is_a_mistake_unless_the_run_has_worked(attempts):
    failed = StartFailed("policy 'alice' while loading its model: GLOO_SOCKET_IFNAME=lo")
    with pytest.raises(StartFailed):
        attempts([failed])
    ended, given = attempts([1, fault()], [failed], [StartFailed("Ray did not start")], [1, 2])
    assert ended == "attempt 4" and len(given) == 4


def test_a_cluster_that_does_not_answer_yet_is_waited_for_while_a_run_is_rebuilt(attempts):
    """At the start it is a mistake in the configuration."""
    ended, given = attempts([1, fault()], [Unreachable("RAY_ADDRESS=there: refused")], [1, 2])
    assert ended == "attempt 3" and len(given) == 3
    with pytest.raises(ConnectionError) as ended:
        attempts([1, fault()], [Unreachable("RAY_ADDRESS=there: refused")], most=1)
    assert not isinstance(ended.value, ConfigError) and "max_restarts=1" in ended.value.__notes__[0]
    with pytest.raises(ConfigError, match="^RAY_ADDRESS") as at_first:
        attempts([Unreachable("RAY_ADDRESS=there: refused")])
    assert not hasattr(at_first.value, "__notes__")


@pytest.mark.parametrize("returns", [True, False])
def test_a_lost_node_has_time_to_return(monkeypatch, returns):
    looks = []

    def check(setup):
        looks.append(setup)
        if not returns or len(looks) < 3:
            raise ConfigError("the pools ask for 2 CPU, the whole cluster has 1")

    monkeypatch.setattr(launch, "check_cluster", check)
    monkeypatch.setattr(launch, "POLL_S", 0.001)
    with nullcontext() if returns else pytest.raises(PlacementTimeout, match="within .*=0.05 s: the pools ask for 2"):
        asyncio.run(launch.wait_for_cluster("setup", 0.05))
    looks.clear()
    with pytest.raises(ConfigError, match="^the pools"):
        asyncio.run(launch.wait_for_cluster("setup", 0.0))
    assert len(looks) == 1, "a first attempt does not wait"


def test_progress_refills_the_budget(attempts):
    steps = [[1, fault()], [1, fault()], [1, 2, fault()], [2, fault()], [2, 3, fault()], [4]]
    ended, given = attempts(*steps, most=2)
    assert ended == "attempt 6" and len(given) == 6


def test_a_full_disk_does_not_take_the_faults_place(attempts, monkeypatch, caplog):
    def full(*note):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recovery, "note_restart", full)
    ended, _ = attempts([1, fault()], [2])
    assert ended == "attempt 2" and "No space left" in caplog.text and "GroupLost" in caplog.text


def test_no_restarts_are_none(attempts):
    with pytest.raises(GroupLost) as ended:
        attempts([fault()], most=0)
    assert not any("max_restarts" in note for note in ended.value.__notes__)


@pytest.mark.parametrize(
    "error", [GroupFailed("it raised"), OSError(errno.ENOSPC, "full"), NotFinite("grad_norm is nan")]
)
def test_what_would_fail_again_ends_the_run_and_names_its_checkpoint(attempts, tmp_path, error):
    with writing(tmp_path, 2):
        pass
    with pytest.raises(type(error)) as ended:
        attempts([1, error])
    assert ended.value is error and str(tmp_path / "global_step_2") in " ".join(error.__notes__)
    assert restarts_of(tmp_path) == 0


def test_a_configuration_error_is_left_as_it_is(attempts):
    with pytest.raises(ConfigError) as ended:
        attempts([ConfigError("wrong")])
    assert not hasattr(ended.value, "__notes__")


def test_a_named_checkpoint_is_taken_until_the_run_has_its_own(tmp_path):
    named = {"resume_mode": "resume_path", "resume_from_path": "/elsewhere/global_step_3", "resume_changes": ["seed"]}
    config = OmegaConf.create({"trainer": named})
    assert to_go_on(config, tmp_path) == config
    with writing(tmp_path, 4):
        pass
    assert to_go_on(config, tmp_path).trainer == named | {"resume_mode": "auto", "resume_from_path": None}


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
@pytest.mark.parametrize("changes", [[], ["seed"]])
def test_a_run_that_is_rebuilt_keeps_its_ledger(mode, changes):
    config = OmegaConf.create({"trainer": {"resume_mode": mode, "resume_changes": changes}})
    assert not ledger_is_foreign(config, again=True)
    assert ledger_is_foreign(config, again=False) is (mode != "auto" or bool(changes))


@pytest.mark.parametrize("again", [False, True])
def test_a_fault_at_the_start_leaves_no_foreign_ledger(monkeypatch, tmp_path, again):
    """The attempt after it takes what is there for its own."""

    async def fails(*parts):
        raise fault()

    trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_changes": ["seed"]}
    resources = {"one_process": True, "timeout_s": 9, "start_timeout_s": None, "request_timeout_s": None}
    resources |= {"placement_timeout_s": 9, "sync_timeout_s": None, "update_timeout_s": None, "save_timeout_s": None}
    config = {"seed": 0, "trainer": trainer, "resources": resources, "controller": {"ledger": True}}
    (tmp_path / "ledger" / "step_1").mkdir(parents=True)
    setup = SimpleNamespace(config=OmegaConf.create(config), policies=[], pools={})
    monkeypatch.setattr(build, "load_data", lambda *parts: SimpleNamespace(steps=1))
    monkeypatch.setattr(build, "make_groups", lambda *parts: ({}, {}))
    monkeypatch.setattr(build, "start_groups", fails)
    with pytest.raises(GroupLost):
        asyncio.run(build.build(setup, TakeDown(), again=again))
    assert (tmp_path / "ledger").exists() is again


def test_taking_a_run_down_goes_on_after_an_error_and_hides_none(caplog):
    done = []

    def fails(part):
        raise OSError(f"{part} is gone")

    with pytest.raises(GroupLost), TakeDown() as cleanup:
        cleanup.callback(done.append, "pool")
        cleanup.callback(fails, "server")
        raise fault()
    assert done == ["pool"] and "taking the run down: OSError: server is gone" in caplog.text


def test_a_block_that_waits_by_itself_has_a_deadline():
    before = signal.getsignal(signal.SIGALRM)
    others = signal.getitimer(signal.ITIMER_REAL)[0]
    late, limit = "placing did not end within 0.05 s; .*raise resources.x", (0.05, "placing", "resources.x")
    with pytest.raises(DeadlinePassed, match=late), interrupted_after(*limit):
        time.sleep(5)
    with interrupted_after(*limit):
        pass
    time.sleep(0.06)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(others, abs=5), "pytest's own goes on"


def test_an_interrupt_within_a_deadline_is_no_late_end():
    with pytest.raises(KeyboardInterrupt), interrupted_after(60, "placing", "resources.x"):
        raise KeyboardInterrupt


def test_weights_that_did_not_arrive_promise_no_end():
    told = str(WeightsNotArrived("alice", "server 0", 3, "old"))
    assert "resources.weight_check=none" in told and "ends" not in told and "resume_mode" not in told


def test_a_clock_that_jumps_changes_no_duration(monkeypatch):
    before = process_seconds()
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert 0 <= process_seconds() - before < 60


def test_no_wait_reads_the_clock_that_jumps():
    """The wall clock orders the ledger's records, compares machines' spans, tells a file's age and names moments for readers."""
    marl = Path(recovery.__file__).parent
    readers = {str(path.relative_to(marl)) for path in marl.rglob("*.py") if "time.time()" in path.read_text()}
    spans = {"cluster/worker_group.py", "cluster/workers/policy_worker.py", "cluster/workers/adapter_worker.py"}
    moments = {"serving/app.py", "serving/chat_reply.py"}
    assert readers == spans | moments | {"utils/process_time.py", "cluster/processes.py", "controller/ledger.py"}


def raised(cause):
    return RayTaskError("update", "traceback", cause)


GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
)
TAKEN = RayTaskError(
    "__init__",
    "DistNetworkError: The server socket has failed to listen. port: 45769, name: EADDRINUSE, message: address already in use",
    RuntimeError("as above"),
)
LATE = RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for send")


@pytest.mark.parametrize(
    "error,kind",
    [
        (ActorDiedError(), GroupLost),
        (ActorUnavailableError("gone for a while", None), GroupLost),
        (OutOfMemoryError("Task was killed due to the node running low on memory"), GroupLost),
        (ActorDiedError(raised(GLOO)), StartFailed),
        (ActorDiedError(TAKEN), GroupLost),
        (raised(ActorDiedError()), GroupLost),
        (raised(GLOO), GroupLost),
        (raised(LATE), GroupHung),
        (raised(TimeoutError("server 1 took no weights for 5 s")), GroupHung),
        (raised(RuntimeError("shapes differ: a timeout of nobody")), GroupFailed),
        (raised(ValueError("gloo/ is in a path")), GroupFailed),
        (raised(OSError(errno.ENOSPC, "No space left on device")), GroupFailed),
    ],
)
def test_a_process_that_is_gone_is_told_from_one_that_raised(error, kind, monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    failed = group_failed("policy 'alice'", "computing update", error)
    assert type(failed) is kind and "process EADDRINUSE" not in str(failed)
    assert can_be_mended(failed) is issubclass(kind, GroupLost) and is_a_hang(failed) is (kind is GroupHung)


@pytest.mark.parametrize(
    "error,mended",
    [
        (DeadlinePassed("update did not end"), True),
        (WeightsNotArrived("alice", "server 0", 3, "old"), True),
        (NodeDiedError("node"), True),
        (WorkerCrashedError(), True),
        (raised(WorkerCrashedError()), True),
        (PlacementTimeout("no room"), False),
        (EpisodesFailed("too many"), False),
        (TimeoutError("a user's"), False),
        (raised(KeyError("weights")), False),
        (MemoryError(), False),
    ],
)
def test_what_can_be_mended(error, mended):
    assert can_be_mended(error) is mended
