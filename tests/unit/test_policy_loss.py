"""The policy's loss and its metrics do not depend on how a mini-batch is cut into micro-batches."""

from functools import partial

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import marl.platform.cpu  # noqa: F401 - registers the platform
from marl.batch.build import to_rows
from marl.cluster.workers.policy_loss import policy_loss
from marl.types import Turn
from marl.utils.ragged import consecutive

LENGTHS, MOVED = (20, 2, 5), 1
"""Tokens of three answers, of which the second has moved by -1 in each log-prob: its ratio, 1 / e, is clipped."""


def rows_of(*lengths):
    turns = [
        Turn("a", 1, [], "", policy="a", prompt_ids=[1, 2], response_ids=[3] * n, response_mask=[1] * n, log_probs=[-1.0] * n)
        for n in lengths
    ]  # fmt: skip
    rows = to_rows([[(turn, 0)] for turn in turns], {"a": 1.0})
    rows["old_log_probs"] = rows["rollout_log_probs"]
    rows["advantages"] = torch.full_like(rows["old_log_probs"], -1.0)
    return rows


def measured(cuts, ranks=1, padding=False):
    """The loss and its metrics, of the micro-batches that begin at ``cuts``, one after another on each of ``ranks``."""
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    loss = partial(policy_loss, partial(ppo_loss, config=config))
    rows, found, total = rows_of(*LENGTHS), {}, 0.0
    for start, end in zip(cuts, [*cuts[1:], len(LENGTHS)], strict=True):
        for blank in [False, *([True] if padding else [])]:
            part = consecutive(rows, start, end)
            if blank:
                part["response_mask"] = torch.zeros_like(part["response_mask"])
            new = [
                torch.cat([torch.zeros(1), torch.full((LENGTHS[i],), -1.0 - (i == MOVED)), torch.zeros(1)])
                for i in range(start, end)
            ]
            tu.assign_non_tensor(part, dp_size=ranks, batch_num_tokens=sum(LENGTHS), global_batch_size=len(LENGTHS))
            value, metrics = loss({"log_probs": torch.nested.as_nested_tensor(new, layout=torch.jagged)}, part)
            total += float(value)
            for key, metric in metrics.items():
                found.setdefault(key, metric.init_list()).append(metric)
    return total / ranks, {key: metric.aggregate() / ranks for key, metric in found.items()}


@pytest.mark.parametrize("cuts", [(0,), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("settings", [{}, {"ranks": 2}, {"padding": True}], ids=str)
def test_shares_and_kl_are_of_tokens_however_they_are_cut(cuts, settings):
    loss, metrics = measured(cuts, **settings)
    assert metrics["actor/ppo_kl"] == pytest.approx(2 / 27) and metrics["actor/pg_clipfrac"] == pytest.approx(2 / 27)
    assert metrics["actor/pg_clipfrac_lower"] == 0
    assert loss == pytest.approx(metrics["actor/pg_loss"]) == pytest.approx((25 + 2 * 0.8) / 27)
