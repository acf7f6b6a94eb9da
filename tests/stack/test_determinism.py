"""``determinism=strict``: an operation without a deterministic form ends the run by its name, in the driver and in workers."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from marl.config.errors import ConfigError
from marl.learners.grpo import GRPO
from marl.platform.determinism import seed_generators

from .builders import numbers, parameters

ROOT = Path(__file__).parents[2]


class PutsBack(GRPO):
    """A learner of one's own with an operation whose result depends on the order of threads."""

    def assign_credit(self, batch):
        flat = torch.zeros(4)
        flat.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return super().assign_credit(batch)


def with_the_operation(run):
    run.trainer.learner.__class__ = PutsBack
    return run


def test_an_operation_without_a_deterministic_form_fails_by_name(alone):
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        with_the_operation(alone("learner=grpo", "determinism=strict")).step()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_without_strict_it_is_nobodys_business(alone):
    with_the_operation(alone("learner=grpo")).step()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_strict_run_trains_with_the_numbers_of_any_other(alone):
    """On a CPU, where the operations of training have a deterministic form."""
    one = alone("learner=mappo", "determinism=strict")
    strict = numbers([one.step() for _ in range(2)])
    other = alone("learner=mappo")
    assert strict == numbers([other.step() for _ in range(2)])
    pairs = zip(parameters(one, "policies"), parameters(other, "policies"), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


LOSS = """
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

@register_policy_loss("puts_back")
def puts_back(*arguments, **options):
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    return get_policy_loss_fn("vanilla")(*arguments, **options)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_fails_in_a_worker_too(cold_assets, tmp_path):
    """A loss of one's own, in the process of a rank."""
    (tmp_path / "puts_back.py").write_text(LOSS)
    words = (
        f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}/run", "determinism=strict", "learner=ippo",
        "actor_rollout_ref.actor.policy_loss.loss_mode=puts_back", "trainer.total_training_steps=1", "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false", "trainer.test_freq=-1", "ray_kwargs.ray_init.num_cpus=4",
    )  # fmt: skip
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "puts_back"}
    done = subprocess.run(
        [sys.executable, "-m", "marl.main", "--config-name", "quickstart", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert done.returncode == 1 and "put_ does not have a deterministic implementation" in done.stderr, done.stderr[
        -2000:
    ]


def test_a_strict_run_needs_a_ray_session_of_its_own(compose_config, monkeypatch):
    from marl.cluster import session

    config = compose_config("determinism=strict")
    monkeypatch.delenv(session.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"ray.shutdown\(\)"):
        session.has_started_strict(config)
    assert session.run_environment(config)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_order_of_hashes_decides_nothing(cold_assets, tmp_path):
    """Python orders sets of texts by a number that is another in every process."""
    dumps = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        words = (
            "--config-name", "quickstart", f"assets={cold_assets}", f"trainer.default_local_dir={folder}", "resources.one_process=true",
            f"trainer.rollout_data_dir={folder}/rollouts", "trainer.total_training_steps=2", "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=4", "learner=mappo", "trainer.val_before_train=false", "trainer.test_freq=-1",
        )  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "marl.main", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        dumps.append((folder / "rollouts" / "2.jsonl").read_text())
    assert dumps[0] == dumps[1]


@pytest.mark.slow
def test_every_process_seeds_its_generators_by_its_name(alone, monkeypatch):
    """Dropout, and whatever a module of one's own draws."""
    from marl import build
    from marl.cluster.workers import critic_worker, policy_worker

    seeds = []
    for module in (build, policy_worker, critic_worker):
        monkeypatch.setattr(module, "seed_generators", seeds.append)
    for options in ((), (), ("seed=1",)):
        seeds.append([])
        alone("learner=mappo", *options)
    first, second, other = (seeds[start + 1 : start + 5] for start in (0, 5, 10))
    assert first == second and len(set(first)) == 4 and not set(first) & set(other)


def test_equal_seeds_draw_the_same_from_every_generator():
    draws = []
    for seed in (5, 5, 6):
        seed_generators(seed)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1] and not set(draws[0]) & set(draws[2])
