"""Faults while a run lives: a process is killed or stopped, the run is built anew, and ends as the unbroken one."""

import json
import os
import signal
import threading
import time

import pytest

from tests.chaos.results import differing, results

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1800)]
COUNT = int(os.environ.get("MARL_FAULTS", "12"))
"""Faults of the long test, one after another."""
STEPS = 6
RUN = (
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=false",
    "trainer.logger=[file]", "trainer.resume_mode=auto", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4",
)  # fmt: skip
IMPATIENT = (
    "resources.update_timeout_s=8", "resources.sync_timeout_s=8", "resources.request_timeout_s=8", "controller.episode_timeout_s=1",
    "resources.save_timeout_s=20",
)  # fmt: skip


@pytest.fixture(scope="session")
def runs(compose_config, cold_assets, tmp_path_factory):
    """Run a configuration in a folder of its own; ``progress`` is told of every step. Returns the folder."""
    from marl.main import run

    def start(name, *overrides, progress=None):
        folder = tmp_path_factory.mktemp(name)
        places = (
            f"trainer.default_local_dir={folder}",
            *(f"trainer.{kind}_data_dir={folder}/{at}" for kind, at in DUMPS.items()),
        )
        run(compose_config(*RUN, f"assets={cold_assets}", *places, *overrides), progress)
        return folder

    return start


DUMPS = {"rollout": "rollouts", "validation": "validation"}


@pytest.fixture(scope="session")
def whole(runs):
    """Results of unbroken runs, by their settings. They need no Ray."""
    known = {}

    def of(*overrides):
        if overrides not in known:
            known[overrides] = results(runs("whole", "resources.one_process=true", *overrides))
        return known[overrides]

    return of


def victims(kind):
    """Processes of the run whose name holds this word."""
    from marl.cluster.processes import MARK, processes_where

    mark = os.environ[MARK]
    found = [process for process in processes_where(mark.__eq__) if kind in "".join(process.cmdline()[:1])]
    assert found, [process.cmdline()[:1] for process in processes_where(mark.__eq__)]
    return sorted(found, key=lambda process: process.pid)


class Hits:
    """Sends signals to processes of the run, each so many seconds after a step has ended."""

    def __init__(self, *plan):
        """``plan``: (step, seconds, kind of process, signal), in order."""
        self.plan, self.at, self.seen = list(plan), [], []

    def __call__(self, step, total, metrics):
        self.seen.append((step, time.monotonic()))
        if self.plan and self.plan[0][0] == step:
            _, seconds, kind, number = self.plan.pop(0)
            threading.Timer(seconds, self.hit, (kind, number)).start()

    def hit(self, kind, number):
        victims(kind)[0].send_signal(number)
        self.at.append(time.monotonic())

    def lost_seconds(self):
        """Time between the first hit and the end of the first step after it."""
        return min(at for _, at in self.seen if at > self.at[0]) - self.at[0]


def faults_of(folder):
    return json.loads((folder / "run.json").read_text())["restarted"]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PAIR, ONE = (), ("sharing=shared",)
WORKER = ("controller.num_workers=1",)


@pytest.mark.parametrize(
    "kind,number,settings,extra,said",
    [
        ("PolicyWorker", KILL, PAIR, (), "GroupLost"),
        ("HFServer", KILL, PAIR, (), "GroupLost"),
        ("EpisodeWorker", KILL, ONE, WORKER, "GroupLost: episode worker 0"),
        ("PolicyWorker", STOP, ONE, IMPATIENT, "8 s; if it only needs longer"),
        ("HFServer", STOP, ONE, IMPATIENT, "8 s"),
        ("EpisodeWorker", STOP, ONE, (*WORKER, *IMPATIENT), "no sign of life"),
    ],
    ids=["dead-rank", "dead-server", "dead-episode-worker", "stopped-rank", "stopped-server", "stopped-episode-worker"],
)
def test_a_run_outlives_a_process(runs, whole, kind, number, settings, extra, said):
    hits = Hits((3, 0.2, kind, number))
    folder = runs("hit", *settings, *extra, progress=hits)
    (fault,) = faults_of(folder)
    assert said in fault["error"] and "global_step_2" in fault["from"]
    print(
        f"\n{kind} {number.name}: {hits.lost_seconds():.1f} s to the next step; {fault['error'].splitlines()[0][:150]}"
    )
    assert not differing(whole(*settings), results(folder))
    stacks = sorted(path.name for path in folder.glob("stacks/*/*"))
    if number is STOP:
        assert any("driver" in name for name in stacks) and len(stacks) > 2, stacks
        told = {path.name: path.read_text() for path in folder.glob("stacks/*/*")}
        assert any("stopped" in text for text in told.values()) and any(
            "most recent call first" in text for text in told.values()
        )
    else:
        assert not stacks
