"""verl's estimators that need no critic, over the turns of a team."""

import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from marl.learners import credit
from marl.learners.decisions import Decisions, Trajectories, penalties
from marl.types import JointBatch

NEED_MORE = {"gae", "remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}
"""Those that need a critic, greedy answers, or gradients."""
UNGROUPED = {"reinforce_plus_plus"}


def known_estimators() -> list[str]:
    """The names of those that need none of it."""
    return sorted(set(ADV_ESTIMATOR_REGISTRY) - NEED_MORE)


def estimate(name: str, settings: AlgoConfig, batch: JointBatch, returns_ERA: Tensor, keys_ERA: Tensor) -> None:
    """Write advantages by verl's estimator of that name, of one policy's turns at a time; a group of one gets 0."""
    function, keys, own_ERA = get_adv_estimator_fn(name), keys_ERA.flatten(), returns_ERA + penalties(batch)
    for rows in batch.rows.values():
        decisions = Decisions.of(batch, rows)
        plan = Trajectories(decisions.cells_D, batch.mask_ERA.shape, separate_turns=True)
        keys_N = keys[decisions.cells_D[plan.first_D]]
        index_N, count_G = credit.group_index(keys_N)
        compared_N = (count_G[index_N] > 1) | (name in UNGROUPED)
        advantages_NT = torch.zeros(plan.shape)
        if compared_N.any():
            advantages_NT[compared_N], _ = function(
                token_level_rewards=plan.lay(decisions.rewards(own_ERA))[compared_N],
                response_mask=plan.mask_NT[compared_N],
                index=keys_N[compared_N].numpy(),
                config=settings,
            )
        decisions.write(batch, plan.take(advantages_NT))
