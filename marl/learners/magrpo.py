"""MAGRPO: the team's return relative to the task's other samples, the same for all agents (arXiv:2508.04652)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.base import register_learner
from marl.learners.estimators import UNGROUPED
from marl.learners.groups import GroupKey, WeightBy, group_keys, group_means
from marl.learners.grpo import GRPO


@register_learner("magrpo")
class MAGRPO(GRPO):
    """With one agent it is Dr. GRPO (arXiv:2503.20783). Each sample counts once in a round, however many agents spoke."""

    default_credit = "team"
    credits = ("team",)

    @dataclass
    class Config(GRPO.Config):
        group_by: list[GroupKey] = field(default_factory=lambda: [GroupKey.task, GroupKey.round])
        weight_by: WeightBy = WeightBy.episode
        std: bool = False

    config: Config

    def returns(self, batch: JointBatch, credit_ERA: Tensor) -> Tensor:
        """The team's rewards from a round on [E, R, A], in which an agent's silence costs it nothing. Each agent's KL penalty
        counts relative to its mean over the task's samples: an agent far from its reference is not at a disadvantage to the others.
        """
        mask_ERA = batch.mask_ERA
        team_ER1 = self.credit.of_team(batch)[..., None]
        later_ERA = credit.returns_to_go(team_ER1, mask_ERA.any(-1, keepdim=True), self.config.gamma) * mask_ERA
        own_ERA = super().returns(batch, torch.zeros_like(credit_ERA))  # minus each turn's KL penalty
        level_ERA = group_means(own_ERA, batch.spoken_ERA, group_keys(batch, [*GroupKey]))
        return batch.apart(later_ERA, credit_ERA) + own_ERA - level_ERA

    @classmethod
    def estimators(cls) -> list[str]:
        """Those that compare no samples: the others would count the turns of one sample's agents, whose returns are equal, as
        separate samples."""
        return sorted({"grpo", *UNGROUPED})
