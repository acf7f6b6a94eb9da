"""Packed rows: an agent's turns in one sequence, and nothing but the number of tokens differs."""

from types import SimpleNamespace

import pytest
import torch

from marl.batch.build import joint_batch
from marl.batch.kl import KLInReward
from tests.unit.test_batching import episode, turn
from tests.unit.test_happo import like


def two_rounds():
    """Agent a's second prompt extends its first turn, agent b's does not."""
    return episode(
        turn("a", 1, [1, 2], [3, 4]), turn("b", 1, [8], [9]), turn("a", 2, [1, 2, 3, 4, 7], [5]), turn("b", 2, [6], [9])
    )


@pytest.mark.parametrize("pack", [False, True])
def test_the_mean_kl_in_the_reward_is_one_of_turns_however_they_share_rows(pack):
    """Turns of 2 and 1 tokens at a KL of .1 and .4: a mean of .25 over turns, of .2 over tokens or rows of both."""
    algorithm = SimpleNamespace(
        kl_penalty="kl", kl_ctrl=SimpleNamespace(type="adaptive", kl_coef=0.5, target_kl=1e-6, horizon=100)
    )
    rows = joint_batch([two_rounds()], ["a", "b"], {"a": 1.0}, pack_turns=pack).rows["a"]
    index, kl = rows["turn_index"].values(), KLInReward(algorithm)
    rows["ref_log_prob"] = like(rows, torch.full((len(index),), -2.0))
    rows["old_log_probs"] = like(rows, torch.where(index == 0, -1.9, -1.6))
    metrics = kl.penalise(rows)
    assert len(rows) == (1 if pack else 2) and metrics["reward_kl_penalty"] == pytest.approx(0.25)
    assert rows["kl_penalty"].values().tolist() == pytest.approx([0.05, 0.05, *([0.0] * pack), 0.2])
    assert kl.controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 100))
