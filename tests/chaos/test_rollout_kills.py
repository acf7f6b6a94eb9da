"""Kills inside rollouts: SIGKILL after a random turn, again and again, until the run has ended as the unbroken one."""

import os
import random
import signal
import time
from collections import Counter

import pytest
import torch

from tests.chaos.forks import in_a_fork
from tests.chaos.outcome import unequal

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1800)]
KILLS = 100
RUN = (
    "resources.one_process=true", "trainer.resume_mode=auto", "trainer.logger=[]", "trainer.save_freq=3", "trainer.test_freq=4", "trainer.val_before_train=false",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=22",
)  # fmt: skip
TURNS = 12
"""Mean number of new turns between two kills."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # a fork has none of torch's others


def played(config, seen, turns=None):
    """The run, which notes every turn's seed in a file, and kills itself with turn number ``turns`` in its hands."""
    from marl.controller.client import PolicyClient
    from marl.main import run

    act, count = PolicyClient.act, 0

    async def noted(self, *args, seed, **options):
        nonlocal count
        turn = await act(self, *args, seed=seed, **options)
        if count == turns:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        with open(seen, "a") as file:
            file.write(f"{seed}\n")
        return turn

    PolicyClient.act = noted
    run(config)


def test_100_kills_inside_rollouts(compose_config, cold_assets, tmp_path):
    import marl.build
    import marl.main  # noqa: F401 - once, not in each process

    def of(name):
        folder = tmp_path / name
        places = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
        return compose_config(*RUN, f"assets={cold_assets}", *places)

    whole, broken = of("whole"), of("broken")
    assert in_a_fork(lambda: played(whole, tmp_path / "whole.txt")) == 0
    rng, started = random.Random(0), time.monotonic()
    for _ in range(KILLS):
        turns = rng.randrange(2 * TURNS + 1)
        status = in_a_fork(lambda turns=turns: played(broken, tmp_path / "broken.txt", turns))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert in_a_fork(lambda: played(broken, tmp_path / "broken.txt")) == 0
    asked = {name: Counter((tmp_path / f"{name}.txt").read_text().split()) for name in ("whole", "broken")}
    skipped, again = asked["whole"] - asked["broken"], asked["broken"] - asked["whole"]
    print(
        f"\n{KILLS} kills, {asked['whole'].total()} turns, {skipped.total()} skipped, {again.total()} generated twice, "
        f"{time.monotonic() - started:.0f} s"
    )
    assert not skipped and not again
    assert unequal(tmp_path / "broken", tmp_path / "whole") == []
