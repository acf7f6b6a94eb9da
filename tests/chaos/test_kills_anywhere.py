"""Kills at random times of a whole run in one process: while it starts, loads, plays, updates, saves, validates and ends."""

import os
import random
import signal
import time
from collections import Counter

import pytest
import torch

from tests.chaos.forks import forked, in_a_fork
from tests.chaos.outcome import unequal

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1800)]
KILLS, STEPS = 80, 100
RUN = (
    "resources.one_process=true", "trainer.resume_mode=auto", "trainer.logger=[]", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=false",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", f"trainer.total_training_steps={STEPS}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # a fork has none of torch's others


class Killed:
    """A run that is killed again and again, each time after some seconds from its start or from its first step."""

    def __init__(self, folder, work):
        self.folder, self.work = folder, work
        self.counts = Counter()

    def once(self, starts, seconds):
        """Raises AssertionError where the run ends before."""
        child = forked(self.work)
        while not starts and not any(self.folder.glob(f"ledger/step_*/*_{child}.jsonl")):
            self._must_live(child)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._must_live(child)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        saves = any(self.folder.glob(".*_global_step_*"))
        self.counts["while it started" if starts else "inside a save" if saves else "in its steps"] += 1

    def _must_live(self, child):
        assert os.waitpid(child, os.WNOHANG)[0] == 0, f"the run ended before, after {self.counts}"
        time.sleep(0.002)


def test_80_kills_at_random_times(compose_config, cold_assets, tmp_path):
    import marl.build  # noqa: F401 - once, not in each process
    from marl.main import run

    def of(name):
        folder = tmp_path / name
        places = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
        return compose_config(*RUN, f"assets={cold_assets}", *places)

    seen, whole, broken = tmp_path / "seen", of("whole"), of("broken")
    note = lambda step, *_: seen.write_text(f"{seen.read_text() if step > 1 else ''}{time.monotonic()}\n")  # noqa: E731
    began = time.monotonic()
    assert in_a_fork(lambda: run(whole, progress=note)) == 0
    first, *_, last = map(float, seen.read_text().split())
    start, step = first - began, (last - first) / (STEPS - 1)
    rng, killed, began = random.Random(0), Killed(tmp_path / "broken", lambda: run(broken)), time.monotonic()
    for _ in range(KILLS):
        starts = rng.random() < 0.25
        killed.once(starts, rng.uniform(0, start if starts else 2 * step))
    assert in_a_fork(lambda: run(broken)) == 0
    print(
        f"\n{KILLS} kills: {dict(killed.counts)}; start {start:.1f} s, step {step:.2f} s; {time.monotonic() - began:.0f} s"
    )
    assert unequal(tmp_path / "broken", tmp_path / "whole") == []
