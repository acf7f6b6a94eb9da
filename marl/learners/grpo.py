"""GRPO for teams: a turn's return relative to the turns of its group (arXiv:2402.03300).

Grouping by (task, agent, round), the default, is AT-GRPO (arXiv:2510.11062) and Dr. MAS (arXiv:2602.08847): agents and
rounds have rewards of their own level, and a pooled baseline would be biased.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from omegaconf import II
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.batch.rows import drop_turns
from marl.learners import credit
from marl.learners.base import Learner, broadcast_to_tokens, register_learner
from marl.learners.estimators import UNGROUPED, estimate, known_estimators
from marl.learners.groups import (
    DEGENERATE,
    GroupKey,
    WeightBy,
    clear_turns,
    degenerate_share,
    episode_weights,
    group_keys,
    policy_keys,
    score_scale,
    unequal_turns,
)
from marl.learners.trajectories import returns
from marl.types import AgentId, Metrics, PolicyName
from marl.utils.numbers import SHARE, bounded


@register_learner("grpo")
class GRPO(Learner):
    @dataclass
    class Config(Learner.Config):
        group_by: list[GroupKey] = field(default_factory=lambda: [GroupKey.task, GroupKey.agent, GroupKey.round])
        """Turns that agree in all of these are compared with one another."""
        weight_by: WeightBy = WeightBy.turn
        """Unit that counts once in a group: each ``turn``, or each ``episode`` however many turns it has in it."""
        std: bool = II("algorithm.norm_adv_by_std_in_grpo")
        """Divide by the group's standard deviation; false gives Dr. GRPO (arXiv:2503.20783)."""
        gamma: float = bounded(II("algorithm.gamma"), SHARE)
        """Discount of an agent's later rounds, for credit of kind ``reward``."""
        estimator: str | None = II("algorithm.adv_estimator")
        """``grpo``, the default, is ours; else one of verl's: rloo, opo, gpg, reinforce_plus_plus …"""
        token_gamma: float = bounded(1.0, SHARE)
        """Discount of a turn's later tokens, for ``reinforce_plus_plus``."""
        drop_equal: bool = False
        """Leaves turns of degenerate groups out of the update, or they would count in its mean (arXiv:2503.14476)."""

    config: Config

    @property
    def compares_samples(self) -> bool:
        return self.config.estimator not in UNGROUPED

    @property
    def weighs_turns(self) -> bool:
        by_turn = self.config.weight_by is WeightBy.turn or self.config.estimator not in (None, "grpo")
        return self.compares_samples and by_turn and GroupKey.round not in self.config.group_by

    def check(self, policies: Mapping[AgentId, Sequence[PolicyName]]) -> None:
        chosen, estimator = self.config.weight_by, self.config.estimator
        if chosen is not type(self).Config.weight_by and estimator not in (None, "grpo"):
            raise ValueError(
                f"learner.weight_by={chosen.value}: algorithm.adv_estimator={estimator} is verl's, which counts turns, and it would have "
                "no effect; use algorithm.adv_estimator=grpo"
            )

    def assign_credit(self, batch: JointBatch) -> Metrics:
        credit_ERA = self.credit.of(batch)
        if self.credit.kind == "advantage":
            for rows in batch.rows.values():
                rows["advantages"] = broadcast_to_tokens(credit_ERA, rows)
            turns = torch.arange(credit_ERA.numel()).view(credit_ERA.shape)
            noise_E11 = credit.ROUNDING[credit_ERA.dtype] * score_scale(batch)
            return self.without_equal(batch, credit_ERA.abs() > noise_E11, turns)
        returns_ERA = self.returns(batch, credit_ERA)
        batch.returns_ERA = returns_ERA
        keys_ERA = group_keys(batch, self.config.group_by) if self.compares_samples else policy_keys(batch)
        unequal_ERA = unequal_turns(batch, returns_ERA, keys_ERA)
        if self.config.estimator in (None, "grpo"):
            advantages_ERA, spoke_ERA = torch.zeros_like(returns_ERA), batch.spoken_ERA.bool()
            by_episode = self.config.weight_by is WeightBy.episode
            weights_B = episode_weights(batch, keys_ERA)[spoke_ERA] if by_episode else None
            advantages_ERA[spoke_ERA] = credit.group_advantages(
                returns_ERA[spoke_ERA], keys_ERA[spoke_ERA], self.config.std, weights_B=weights_B
            )
            for rows in batch.rows.values():
                rows["advantages"] = broadcast_to_tokens(advantages_ERA * unequal_ERA, rows)
        else:
            from verl.trainer.config import AlgoConfig  # heavy: a configuration is checked without it

            settings = AlgoConfig(gamma=self.config.token_gamma, norm_adv_by_std_in_grpo=self.config.std)
            estimate(self.config.estimator, settings, batch, returns_ERA, keys_ERA)
            clear_turns(batch, ~unequal_ERA)  # rounding leaves verl's with noise to divide
        return self.without_equal(batch, unequal_ERA, keys_ERA)

    def without_equal(self, batch: JointBatch, unequal_ERA: Tensor, keys_ERA: Tensor) -> Metrics:
        """Count degenerate groups and, with ``drop_equal``, drop their turns. For a credit of kind ``advantage`` each turn is
        a group."""
        shares = degenerate_share(batch, unequal_ERA, keys_ERA)
        if self.config.drop_equal:
            drop_turns(batch, ~unequal_ERA)
        share = self.degenerate_share(shares)
        if share is not None:
            self.follow("degenerate_groups", share)
        return shares

    def degenerate_share(self, metrics: Metrics) -> float | None:
        return metrics.get(DEGENERATE)

    def returns(self, batch: JointBatch, credit_ERA: Tensor) -> Tensor:
        """Return by which turns are compared [E, R, A]: the credit and, if it is a reward, the agent's later ones."""
        return returns(batch, credit_ERA, self.credit.kind, self.config.gamma)

    @classmethod
    def estimators(cls) -> list[str]:
        return known_estimators()
