"""Policies that are adapters on one base (``sharing=lora``): each is updated, served, referred to and saved as if it were alone."""

import pytest
import torch
from safetensors.torch import load_file

ADAPTED = (
    "sharing=lora", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "actor_rollout_ref.actor.optim.lr=0.01",
)  # fmt: skip


def engine_of(live, policy="alice"):
    return live.trainer.policies[policy].workers.worker.engine


def weights(live, policy):
    return dict(engine_of(live, policy).adapter_weights(policy))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_servers_play_with_every_adapter_bit_for_bit(alone):
    live = alone(*ADAPTED)
    assert live.trainer.policies["alice"].workers is live.trainer.policies["carol"].workers
    for _ in range(2):
        metrics = live.step()
        for agent in ("alice", "carol"):
            assert metrics[f"agent/{agent}/log_prob_gap_max"] <= 1e-5
            assert metrics[f"agent/{agent}/grad_norm"] > 0
    assert not same(weights(live, "alice"), weights(live, "carol"))
