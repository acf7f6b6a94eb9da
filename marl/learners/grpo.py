"""GRPO for teams: a turn's return relative to the turns of its group (arXiv:2402.03300).

Grouping by (task, agent, round), the default, is AT-GRPO (arXiv:2510.11062) and Dr. MAS (arXiv:2602.08847): agents and
rounds have rewards of their own level, and a pooled baseline would be biased.
"""

from dataclasses import dataclass, field
from enum import Enum

import torch
from omegaconf import II
from torch import Tensor

from marl.learners import credit
from marl.learners.base import Learner, register_learner, spread
from marl.types import JointBatch, Metrics


class GroupKey(Enum):
    task = 0
    round = 1
    agent = 2


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

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        credit_ERA = self.credit.assign(batch)
        if self.credit.kind == "reward":
            credit_ERA = credit.returns_to_go(credit_ERA, batch.mask_ERA, self.config.gamma)
        spoke_ERA = batch.mask_ERA.bool()
        keys_B = self.keys(batch)[spoke_ERA]
        advantages_ERA, metrics = credit_ERA, {}
        if self.credit.kind != "advantage":
            advantages_ERA = torch.zeros_like(credit_ERA)
            advantages_ERA[spoke_ERA] = credit.group_advantages(credit_ERA[spoke_ERA], keys_B, self.config.std)
            metrics = degenerate_share(batch, credit_ERA, keys_B)
        for rows in batch.rows.values():
            rows["advantages"] = spread(advantages_ERA, rows)
        return metrics

    def keys(self, batch: JointBatch) -> Tensor:
        """The group number [E, R, A] of every turn."""
        tasks_E, _ = credit.group_index(batch.tasks_E)
        shape = batch.mask_ERA.shape
        axes = [tasks_E, torch.arange(shape[1]), torch.arange(shape[2])]
        keys_ERA = torch.zeros(shape, dtype=torch.long)
        for axis, numbers in enumerate(axes):
            if GroupKey(axis) in self.config.group_by:
                view = [1, 1, 1]
                view[axis] = -1
                keys_ERA = keys_ERA * (int(numbers.max()) + 1) + numbers.view(view)
        return keys_ERA


def degenerate_share(batch: JointBatch, credit_ERA: Tensor, keys_B: Tensor) -> Metrics:
    """Per agent, the share of its turns whose group is all alike and teaches nothing."""
    spoke_ERA = batch.mask_ERA.bool()
    index_B, count_G = credit.group_index(keys_B)
    unequal_G = credit.unequal_groups(credit_ERA[spoke_ERA], index_B, len(count_G))
    degenerate_ERA = torch.zeros_like(spoke_ERA)
    degenerate_ERA[spoke_ERA] = ~unequal_G[index_B]
    return {
        f"agent/{agent}/degenerate_groups": float(degenerate_ERA[..., a][spoke_ERA[..., a]].float().mean())
        for a, agent in enumerate(batch.agents)
        if spoke_ERA[..., a].any()
    }
