"""IPPO: every agent runs PPO on its own reward with a critic of its own observation (arXiv:2011.09533)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from omegaconf import II
from torch import Tensor
from verl.utils.torch_functional import masked_whiten

from marl.learners import credit
from marl.learners.base import Learner, register_learner
from marl.learners.decisions import Decisions, Trajectories
from marl.types import JointBatch, Metrics


@register_learner("ippo")
class IPPO(Learner):
    """GAE (arXiv:1506.02438) over the turns or the tokens of an agent, as the critic's level says.

    Credit of kind ``reward`` is added up over an agent's rounds, whose values bootstrap one another; credit of kind
    ``return`` holds the later rounds already, so that every turn ends its own estimate.
    """

    critic: ClassVar[Literal["none", "local", "central"]] = "local"

    @dataclass
    class Config(Learner.Config):
        gamma: float = II("algorithm.gamma")
        lam: float = II("algorithm.lam")
        whiten: bool = True
        """Advantages of a policy's batch get mean 0 and deviation 1, as in verl's PPO."""

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        rewards_ERA = self.rewards(batch)
        metrics: Metrics = {}
        separate_turns = self.credit.kind == "return"
        for name, rows in batch.rows.items():
            decisions = Decisions.of(batch, rows)
            plan = Trajectories(decisions.cells_D, batch.mask_ERA.shape, separate_turns, batch.siblings_ERA)
            rewards_NT, values_NT = plan.lay(decisions.rewards(rewards_ERA)), plan.lay(decisions.values_D)
            advantages_NT = credit.gae(rewards_NT, values_NT, plan.mask_NT, self.config.gamma, self.config.lam)
            returns_NT = advantages_NT + values_NT
            if self.config.whiten:
                alone = len(decisions.cells_D) == 1  # compared with itself: verl's whitening would raise
                advantages_NT = torch.zeros_like(advantages_NT) if alone else masked_whiten(advantages_NT, plan.mask_NT)
            returns_D = plan.take(returns_NT)
            decisions.write(batch, plan.take(advantages_NT), returns_D)
            metrics[f"value/{name}/explained_variance"] = credit.explained_variance(decisions.values_D, returns_D)
            metrics[f"value/{name}/value"] = float(decisions.values_D.mean())
            metrics[f"value/{name}/return"] = float(returns_D.mean())
        return metrics

    @classmethod
    def estimators(cls) -> list[str]:
        return ["gae"]

    def rewards(self, batch: JointBatch) -> Tensor:
        """Rewards [E, R, A] of the trained turns."""
        credit_ERA = self.credit.of(batch)
        if self.credit.kind == "return":
            return credit_ERA
        mask_ERA = batch.path().mask_ERA
        if batch.siblings_ERA is None:
            return credit.fold_untrained(credit_ERA, mask_ERA, batch.trained_ERA, self.config.gamma)
        alone_ERA = batch.siblings_ERA >= 0  # worth their own verdicts, whatever comes after
        chained_ERA = batch.trained_ERA & mask_ERA & ~alone_ERA
        folded_ERA = credit.fold_untrained(credit_ERA, mask_ERA & ~alone_ERA, chained_ERA, self.config.gamma)
        return torch.where(alone_ERA, credit_ERA, folded_ERA)
