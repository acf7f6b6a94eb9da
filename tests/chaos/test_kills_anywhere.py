"""Kills at random times of a whole run in one process: while it starts, loads, plays, updates, saves, validates and ends."""

import os
import random
import signal
import time

import pytest
import torch

from tests.chaos.forks import forked, in_a_fork
from tests.chaos.results import unequal

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1800)]
KILLS = 80
RUN = (
    "resources.one_process=true", "trainer.resume_mode=auto", "trainer.logger=[]", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=false",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=160",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # a fork has none of torch's others


def killed_within(seconds, work):
    """Kill a process that does this work after so many seconds. Returns True if it lived as long."""
    child, ends = forked(work), time.monotonic() + seconds
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert status == 0
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_80_kills_at_random_times(compose_config, cold_assets, tmp_path):
    import marl.build
    from marl.main import run

    def of(name):
        folder = tmp_path / name
        places = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
        return compose_config(*RUN, f"assets={cold_assets}", *places)

    whole, broken = of("whole"), of("broken")
    assert in_a_fork(lambda: run(of("warm_up"), progress=lambda *_: os._exit(0))) == 0
    began = time.monotonic()
    assert in_a_fork(lambda: run(of("started"), progress=lambda *_: os._exit(0))) == 0
    start = time.monotonic() - began
    assert in_a_fork(lambda: run(whole)) == 0
    rng, kills, saving, began = random.Random(0), 0, 0, time.monotonic()
    while kills < KILLS and killed_within(rng.uniform(0, 2 * start), lambda: run(broken)):
        kills += 1
        saving += any((tmp_path / "broken").glob(".*_global_step_*"))
    assert kills == KILLS, "the run ended before; raise trainer.total_training_steps"
    assert in_a_fork(lambda: run(broken)) == 0
    print(
        f"\n{kills} kills ({saving} inside a save) at 0 to {2 * start:.1f} s, of which the first step begins at {start:.1f} s; "
        f"{time.monotonic() - began:.0f} s"
    )
    assert unequal(tmp_path / "broken", tmp_path / "whole") == []
