"""verl's estimators that need no critic, over the turns of a team."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.trajectories import Decisions, Trajectories, penalties

if TYPE_CHECKING:
    from verl.trainer.config import AlgoConfig

NEED_MORE = {"gae", "remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}
"""Those that need a critic, greedy answers, or gradients."""
UNGROUPED = {"reinforce_plus_plus"}
COUNTS_ZEROS = {"gpg"}
"""Those to which a reward of 0 is another thing than the lowest reward."""
WHITENED = ("reinforce_plus_plus", "grpo")
"""Beginnings of the names of those that divide by a deviation, to which verl adds a constant."""


def known_estimators() -> list[str]:
    """The names of those that need none of it."""
    # heavy: most configurations are checked without them
    import marl.platform.cpu  # isort: skip # noqa: F401 - registers the platform before anything of verl asks for one
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return sorted(set(ADV_ESTIMATOR_REGISTRY) - NEED_MORE)


def estimate(name: str, settings: AlgoConfig, batch: JointBatch, returns_ERA: Tensor, keys_ERA: Tensor) -> None:
    """Write advantages by verl's estimator of that name, of one policy's turns at a time; a group of one gets 0.

    What a policy's turns are compared with is their whole group, whether the others are trained or not.
    """
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    function, keys, own_ERA = get_adv_estimator_fn(name), keys_ERA.flatten(), returns_ERA + penalties(batch)
    divides = name.startswith(WHITENED) and (settings.norm_adv_by_std_in_grpo or name in UNGROUPED)
    for rows in batch.rows.values():
        decisions = Decisions.of(batch, rows)
        plan = Trajectories(decisions.cells_D, batch, separate_turns=True)
        cells_N = decisions.cells_D[plan.first_D]
        others_M = cells_N[:0] if name in UNGROUPED else others_of(batch, keys, cells_N)
        rewards_NT, mask_NT = with_others(
            plan.to_matrix(decisions.rewards(own_ERA)), plan.mask_NT, batch, returns_ERA.flatten()[others_M], others_M
        )
        if name not in UNGROUPED | COUNTS_ZEROS:
            rewards_NT = without_offset(rewards_NT, mask_NT)
        if divides:
            rewards_NT = in_own_units(rewards_NT)
        keys_N = keys[torch.cat([cells_N, others_M])]
        index_N, count_G = credit.group_index(keys_N)
        compared_N = (count_G[index_N] > 1) | (name in UNGROUPED)
        advantages_NT = torch.zeros_like(rewards_NT)
        if mask_NT[compared_N].sum() > 1:  # verl's whitening raises for a single token
            advantages_NT[compared_N], _ = function(
                token_level_rewards=rewards_NT[compared_N],
                response_mask=mask_NT[compared_N],
                index=keys_N[compared_N].numpy(),
                config=settings,
            )
        decisions.write(batch, plan.from_matrix(advantages_NT))


def without_offset(rewards_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Rewards less the lowest sum, at each last decision: verl's vectorised estimators compute in single precision."""
    last_NT = (mask_NT.cumsum(-1) * mask_NT).argmax(-1, keepdim=True) == torch.arange(mask_NT.shape[-1])
    return rewards_NT - rewards_NT.sum(-1).min() * last_NT


def in_own_units(rewards_NT: Tensor) -> Tensor:
    """Rewards whose sums differ by a half to 1, so that verl's constant is small beside their deviation. A power of 2 rounds nothing."""
    sums_N = rewards_NT.sum(-1)
    return torch.ldexp(rewards_NT, -torch.frexp(sums_N.max() - sums_N.min()).exponent)


def others_of(batch: JointBatch, keys: Tensor, cells_N: Tensor) -> Tensor:
    """The cells of the turns that share a group with these, and are none of them."""
    others = batch.spoken_ERA.flatten() & torch.isin(keys, keys[cells_N])
    others[cells_N] = False
    return others.nonzero()[:, 0]


def with_others(
    rewards_NT: Tensor, mask_NT: Tensor, batch: JointBatch, returns_M: Tensor, others_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards and mask with further turns below, whose returns stand at their last tokens."""
    if len(others_M) == 0:
        return rewards_NT, mask_NT
    lengths_M = batch.lengths_ERA.flatten()[others_M].clamp(min=1)
    width = max(rewards_NT.shape[1], int(lengths_M.max()))
    wider = (0, width - rewards_NT.shape[1])
    place_T = torch.arange(width)
    mask_MT = (place_T < lengths_M[:, None]).to(mask_NT.dtype)
    rewards_MT = torch.where(place_T == lengths_M[:, None] - 1, returns_M[:, None], 0.0)
    return torch.cat([pad(rewards_NT, wider), rewards_MT]), torch.cat([pad(mask_NT, wider), mask_MT])
