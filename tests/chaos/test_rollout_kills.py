"""Kills inside rollouts: SIGKILL after a random turn, again and again, until the run has ended as the unbroken one."""

import json
import os
import random
import signal
import time
import traceback
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

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


def in_a_fork(work):
    """The status of a process of its own that does this work."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


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


def results(folder):
    """Weights, optimizers, dumped episodes and validation: all that a run is about."""
    last = max(folder.glob("global_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
    weights = {path.parts[-4]: load_file(path) for path in last.glob("*/actor/huggingface/model.safetensors")}
    moments = {path.parts[-3]: torch.load(path, weights_only=False) for path in last.glob("*/actor/optim_*.pt")}
    dumps = {
        str(path.relative_to(folder)): [json.loads(line) for line in path.open()]
        for kind in ("rollouts", "validation")
        for path in folder.glob(f"{kind}/*.jsonl")
    }
    assert len(weights) == len(moments) == 2 and dumps
    return {"step": last.name, "weights": weights, "moments": moments, "dumps": dumps}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "to_local"):
        one, other = one.to_local(), other.to_local()
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


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
    for name, value in results(tmp_path / "whole").items():
        assert equal(value, results(tmp_path / "broken")[name]), name
