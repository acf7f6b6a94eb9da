"""Adapters in Ray's processes: episodes played by workers, the base in one pool with a critic. As in one process."""

import pytest
import torch
from safetensors.torch import load_file

from marl.main import run

from .conftest import SMALL

STEPS = 3
ADAPTERS = (
    "sharing=lora", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "learner=mappo",
)  # fmt: skip


@pytest.fixture
def train(cluster, compose_config, cold_assets, tmp_path):
    """Train three steps; returns the metrics of each, and both adapters as they were saved."""

    def train(label, *overrides):
        folder, steps = tmp_path / label, []
        config = compose_config(
            f"assets={cold_assets}", f"trainer.default_local_dir={folder}", *SMALL, *ADAPTERS, "resources.timeout_s=200",
            f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}", *overrides,
        )  # fmt: skip
        run(config, lambda step, total, metrics: steps.append(metrics))
        saved = folder / f"global_step_{STEPS}"
        adapters = [
            load_file(saved / name / "actor" / "lora_adapter" / "adapter_model.safetensors")
            for name in ("alice", "carol")
        ]
        return steps, adapters

    return train


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_and_a_critic_in_the_pool_change_nothing(train):
    """The servers sleep while the critic and the adapters work."""
    one, adapters = train("one", "resources.one_process=true")
    pool = (
        "resources.placement=colocated",
        "actor_rollout_ref.rollout.free_cache_engine=true",
        "controller.num_workers=2",
    )
    other, other_adapters = train("ray", *pool)
    for mine, theirs in zip(one, other, strict=True):
        for key in ("agent/alice/grad_norm", "agent/carol/grad_norm", "critic/central/grad_norm"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5) and mine[key] > 0, key
        for agent in ("alice", "carol"):
            assert theirs[f"agent/{agent}/log_prob_gap_max"] <= 1e-5
    for mine, theirs in zip(adapters, other_adapters, strict=True):
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) <= 1e-4
    alice, carol = adapters
    assert any(not torch.equal(alice[name], carol[name]) for name in alice), "each has an adapter of its own"
