"""IPPO: every agent runs PPO on its own reward with a critic of its own observation (arXiv:2011.09533)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from omegaconf import II
from torch import Tensor

from marl.batch.critic_spec import CriticSpec, LocalCritics
from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.base import Learner, register_learner
from marl.learners.trajectories import Decisions, Trajectories
from marl.types import Metrics, PolicyName
from marl.utils.numbers import SHARE, bounded


@register_learner("ippo")
class IPPO(Learner):
    """GAE (arXiv:1506.02438) over the turns or the tokens of an agent, as the critic's level says.

    Credit of kind ``reward`` is added up over an agent's rounds, whose values bootstrap one another; credit of kind
    ``return`` holds the later rounds already, so that every turn ends its own estimate.
    """

    critics: CriticSpec = LocalCritics()

    @dataclass
    class Config(Learner.Config):
        gamma: float = bounded(II("algorithm.gamma"), SHARE)
        """Discount of a round of the episode, whether the agent speaks in it or not."""
        lam: float = bounded(II("algorithm.lam"), SHARE)
        """GAE's lambda from one of an agent's decisions to its next: a turn or a token, whichever the critic values."""
        token_gamma: float = bounded(1.0, SHARE)
        """Discount of a turn's later tokens, where the critic values tokens."""
        whiten: bool = True
        """Advantages of a policy's batch get mean 0 and deviation 1, as in verl's PPO."""

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        rewards_ERA = self.rewards(batch)
        metrics: Metrics = {}
        decisions = {name: Decisions.of(batch, rows) for name, rows in batch.rows.items()}
        for name, advantages_D in self.estimate(batch, decisions, rewards_ERA).items():
            own = decisions[name]
            returns_D = advantages_D + own.values_D
            if self.config.whiten:
                advantages_D = self.trajectories(batch, own.cells_D).whitened(advantages_D)
            own.write(batch, advantages_D, returns_D)
            metrics[f"value/{name}/explained_variance"] = credit.explained_variance(own.values_D, returns_D)
            metrics[f"value/{name}/value"] = float(own.values_D.mean())
            metrics[f"value/{name}/return"] = float(returns_D.mean())
        return metrics

    def trajectories(self, batch: JointBatch, cells_D: Tensor) -> Trajectories:
        separate_turns = self.credit.kind == "return"
        return Trajectories(cells_D, batch, separate_turns)

    def estimate(
        self, batch: JointBatch, decisions: Mapping[PolicyName, Decisions], rewards_ERA: Tensor
    ) -> dict[PolicyName, Tensor]:
        """Advantages [D] of each policy's decisions. A trajectory is an agent's, whatever policies it acts with."""
        if not decisions:
            return {}
        parts, config = decisions.values(), self.config
        plan = self.trajectories(batch, torch.cat([own.cells_D for own in parts]))
        rewards_NT = plan.to_matrix(torch.cat([own.rewards(rewards_ERA) for own in parts]).float())  # as critics are
        values_NT = plan.to_matrix(torch.cat([own.values_D for own in parts]))
        discounts_NT = plan.discounts(config.gamma, config.token_gamma)
        advantages_D = plan.from_matrix(credit.gae(rewards_NT, values_NT, plan.mask_NT, discounts_NT, config.lam))
        return dict(zip(decisions, advantages_D.split([len(own.cells_D) for own in parts]), strict=True))

    @classmethod
    def estimators(cls) -> list[str]:
        return ["gae"]

    def rewards(self, batch: JointBatch) -> Tensor:
        """Rewards [E, R, A] of the trained turns."""
        credit_ERA, chained_ERA = self.credit.of(batch), batch.chained_ERA
        if self.credit.kind == "return":
            return credit_ERA
        rewards_ERA = self.turn_rewards(batch, credit_ERA)
        return batch.apart(self.fold(rewards_ERA, chained_ERA, batch.trained_ERA & chained_ERA), credit_ERA)

    def turn_rewards(self, batch: JointBatch, credit_ERA: Tensor) -> Tensor:
        """Rewards [E, R, A] of the conversations' turns, trained or not."""
        return credit_ERA

    def fold(self, credit_ERA: Tensor, mask_ERA: Tensor, trained_ERA: Tensor) -> Tensor:
        """Rewards of trained turns, including those of the untrained turns after them."""
        return credit.fold_untrained(credit_ERA, mask_ERA, trained_ERA, self.config.gamma)
