"""MAPPO: IPPO with one critic that reads the joint observation, and the team's reward by default (arXiv:2103.01955).

With ``credit=influence`` it is MAPoRL (arXiv:2502.18439), whose paper asks for such a critic; with ``learner.chain=true`` its
advantages are those of MARFT (arXiv:2504.16129).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marl.learners import credit
from marl.learners.base import register_learner
from marl.learners.decisions import Decisions, Trajectories
from marl.learners.ippo import IPPO
from marl.types import AgentId, JointBatch, PolicyName


@register_learner("mappo")
class MAPPO(IPPO):
    critic = "central"
    default_credit = "team"

    @dataclass
    class Config(IPPO.Config):
        chain: bool = False
        """GAE runs along the agents' order inside a round, then across rounds, over the decisions of all of them: every step
        of the chain is discounted. The team's reward of a round is paid at its last speaker. Values bootstrap
        one another inside a round too, though the critic reads no turn of the same round."""

    config: Config

    def check(self, policies: Mapping[AgentId, Sequence[PolicyName]]) -> None:
        super().check(policies)
        if self.config.chain and self.credit.kind != "reward":
            raise ValueError(
                f"learner.chain=true with credit={self.credit.config.name}: a chain adds up what rounds pay, and this credit "
                f"is of kind {self.credit.kind}; use credit=team, or learner.chain=false"
            )

    def estimate(
        self,
        batch: JointBatch,
        decisions: Mapping[PolicyName, Decisions],
        plans: Mapping[PolicyName, Trajectories],
        rewards_ERA: Tensor,
    ) -> dict[PolicyName, Tensor]:
        if not self.config.chain:
            return super().estimate(batch, decisions, plans, rewards_ERA)
        all_of_them = decisions.values()
        cells_D = torch.cat([own.cells_D for own in all_of_them])
        rewards_D = torch.cat([own.rewards(rewards_ERA) for own in all_of_them])
        values_D = torch.cat([own.values_D for own in all_of_them])
        plan = Trajectories(cells_D, batch.mask_ERA.shape, False, batch.siblings_ERA, chain=True)
        advantages = self.gae(plan, rewards_D, values_D).split([len(own.cells_D) for own in all_of_them])
        return dict(zip(decisions, advantages, strict=True))

    def paid(self, batch: JointBatch) -> Tensor:
        """In a chain the team's reward of every round, at its last speaker."""
        credit_ERA, mask_ERA, alone = super().paid(batch), batch.path().mask_ERA, batch.siblings_ERA
        if not self.config.chain:
            return credit_ERA
        if alone is None:
            return credit.at_last_speakers(self.credit.of_team(batch), mask_ERA)
        paid_ERA = credit.at_last_speakers(self.credit.of_team(batch), mask_ERA & (alone < 0))
        return torch.where(alone >= 0, credit_ERA, paid_ERA)

    def fold(self, credit_ERA: Tensor, mask_ERA: Tensor, trained_ERA: Tensor) -> Tensor:
        """In a chain what untrained turns earn goes to the last trained turn before them, whoever spoke it."""
        if not self.config.chain:
            return super().fold(credit_ERA, mask_ERA, trained_ERA)
        chain = (len(mask_ERA), -1, 1)
        folded_EC1 = credit.fold_untrained(
            credit_ERA.reshape(chain), mask_ERA.reshape(chain), trained_ERA.reshape(chain), self.config.gamma
        )
        return folded_EC1.view(mask_ERA.shape)
