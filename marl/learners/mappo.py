"""MAPPO: IPPO with one critic that reads the joint observation, and the team's reward by default (arXiv:2103.01955).

With ``credit=influence`` it is MAPoRL (arXiv:2502.18439), whose paper asks for such a critic; with ``learner.chain=true`` its
advantages are those of MARFT (arXiv:2504.16129).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marl.batch.critic_spec import CentralCritic
from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.base import register_learner
from marl.learners.ippo import IPPO
from marl.learners.trajectories import Trajectories
from marl.types import AgentId, PolicyName


@register_learner("mappo")
class MAPPO(IPPO):
    critics = CentralCritic()
    default_credit = "team"

    @dataclass
    class Config(IPPO.Config):
        chain: bool = False
        """GAE runs along the agents' order inside a round, then across rounds, over the decisions of all of them: lambda counts
        every turn of the chain, gamma its rounds. The team's reward of a round goes to its last speaker.
        Values bootstrap one another inside a round too, though the critic reads no turn of the same round."""

    config: Config

    def check(self, policies: Mapping[AgentId, Sequence[PolicyName]]) -> None:
        super().check(policies)
        if self.config.chain and self.credit.kind != "reward":
            raise ValueError(
                f"learner.chain=true with credit={self.credit.config.name}: a chain sums the rewards of rounds, but this credit "
                f"is of kind {self.credit.kind}; use credit=team, or learner.chain=false"
            )
        if self.config.chain and self.credit.sums_to_zero:
            raise ValueError(
                f"learner.chain=true with credit={self.credit.config.name}: a chain gets the mean of the agents' rewards, "
                "which is 0 when one wins what the others lose; use credit=team, or learner.chain=false"
            )

    def trajectories(self, batch: JointBatch, cells_D: Tensor) -> Trajectories:
        if not self.config.chain:
            return super().trajectories(batch, cells_D)
        return Trajectories(cells_D, batch, separate_turns=False, chain=True)

    def turn_rewards(self, batch: JointBatch, credit_ERA: Tensor) -> Tensor:
        """In a chain the team's reward of every round, at its last speaker."""
        if not self.config.chain:
            return super().turn_rewards(batch, credit_ERA)
        return credit.at_last_speakers(self.credit.of_team(batch), batch.chained_ERA)

    def fold(self, credit_ERA: Tensor, mask_ERA: Tensor, trained_ERA: Tensor) -> Tensor:
        """In a chain, rewards of untrained turns go to the last trained turn before them, whichever agent took it."""
        if not self.config.chain:
            return super().fold(credit_ERA, mask_ERA, trained_ERA)
        links, (_, num_rounds, num_agents) = (len(mask_ERA), -1, 1), mask_ERA.shape
        gamma_C = torch.tensor([1.0] * (num_agents - 1) + [self.config.gamma]).repeat(num_rounds)
        folded_EC1 = credit.fold_untrained(
            credit_ERA.reshape(links), mask_ERA.reshape(links), trained_ERA.reshape(links), gamma_C
        )
        return folded_EC1.view(mask_ERA.shape)
