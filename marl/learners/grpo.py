"""GRPO for teams: a turn's return relative to the turns of its group (arXiv:2402.03300).

Grouping by (task, agent, round), the default, is AT-GRPO (arXiv:2510.11062) and Dr. MAS (arXiv:2602.08847): agents and
rounds have rewards of their own level, and a pooled baseline would be biased.
"""

from dataclasses import dataclass, field

import torch
from omegaconf import II
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from marl.learners import credit
from marl.learners.base import Learner, register_learner, spread
from marl.learners.decisions import Decisions, Trajectories, penalties
from marl.learners.groups import GroupKey, degenerate_share, group_keys
from marl.types import JointBatch, Metrics

NEED_MORE = {"gae", "remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}
"""verl's estimators that need a critic, greedy answers, or gradients, which this learner has not."""
UNGROUPED = {"reinforce_plus_plus"}


@register_learner("grpo")
class GRPO(Learner):
    compares_samples = True

    @dataclass
    class Config(Learner.Config):
        group_by: list[GroupKey] = field(default_factory=lambda: [GroupKey.task, GroupKey.agent, GroupKey.round])
        """Turns that agree in all of these are compared with one another."""
        std: bool = II("algorithm.norm_adv_by_std_in_grpo")
        """Divide by the group's standard deviation; false gives Dr. GRPO (arXiv:2503.20783)."""
        gamma: float = II("algorithm.gamma")
        """Discount of an agent's later rounds, for credit of kind ``reward``."""
        estimator: str | None = II("algorithm.adv_estimator")
        """``grpo``, the default, is ours; else one of verl's: rloo, opo, gpg, reinforce_plus_plus …"""
        token_gamma: float = 1.0
        """Discount of a turn's later tokens, for ``reinforce_plus_plus``."""

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        credit_ERA = self.credit.of(batch)
        if self.credit.kind == "advantage":
            for rows in batch.rows.values():
                rows["advantages"] = spread(credit_ERA, rows)
            return {}
        rewards_ERA = credit_ERA - penalties(batch)
        if self.credit.kind == "reward":
            returns_ERA = credit.returns_to_go(rewards_ERA, batch.path().mask_ERA, self.config.gamma)
            alone = batch.siblings_ERA
            rewards_ERA = returns_ERA if alone is None else torch.where(alone >= 0, rewards_ERA, returns_ERA)
        if self.config.estimator not in (None, "grpo"):
            self.estimate(batch, rewards_ERA)
        else:
            advantages_ERA = torch.zeros_like(rewards_ERA)
            spoke_ERA = batch.mask_ERA.bool()
            keys_B = group_keys(batch, self.config.group_by)[spoke_ERA]
            advantages_ERA[spoke_ERA] = credit.group_advantages(rewards_ERA[spoke_ERA], keys_B, self.config.std)
            for rows in batch.rows.values():
                rows["advantages"] = spread(advantages_ERA, rows)
        return degenerate_share(batch, rewards_ERA, group_keys(batch, self.config.group_by))

    def estimate(self, batch: JointBatch, rewards_ERA: Tensor) -> None:
        """Advantages by one of verl's estimators, of one policy's turns at a time; a group of one gets 0."""
        function = get_adv_estimator_fn(self.config.estimator)
        settings = AlgoConfig(gamma=self.config.token_gamma, norm_adv_by_std_in_grpo=self.config.std)
        keys_ERA, own_ERA = group_keys(batch, self.config.group_by).flatten(), rewards_ERA + penalties(batch)
        for rows in batch.rows.values():
            decisions = Decisions.of(batch, rows)
            plan = Trajectories(decisions.cells_D, batch.mask_ERA.shape, separate_turns=True)
            keys_N = keys_ERA[decisions.cells_D[plan.first_D]]
            index_N, count_G = credit.group_index(keys_N)
            compared_N = (count_G[index_N] > 1) | (self.config.estimator in UNGROUPED)
            advantages_NT = torch.zeros(plan.shape)
            if compared_N.any():
                advantages_NT[compared_N], _ = function(
                    token_level_rewards=plan.lay(decisions.rewards(own_ERA))[compared_N],
                    response_mask=plan.mask_NT[compared_N],
                    index=keys_N[compared_N].numpy(),
                    config=settings,
                )
            decisions.write(batch, plan.take(advantages_NT))

    @classmethod
    def estimators(cls) -> list[str]:
        return sorted(set(ADV_ESTIMATOR_REGISTRY) - NEED_MORE)
