"""RAE, role-conditioned advantages for self-play: a return relative to the moving mean of its game and role
(SPIRAL, arXiv:2506.24119)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import II
from torch import Tensor

from marl.learners.base import Learner, register_learner, spread
from marl.learners.decisions import returns
from marl.types import JointBatch, Metrics


@register_learner("rae")
class RAE(Learner):
    """A = R - b, where b follows R of the same data source and agent: b <- decay b + (1 - decay) mean R, without the pull
    towards 0 of its first steps. A role's constant advantage of the first move is so no credit of anybody."""

    default_credit = "zero_sum"

    @dataclass
    class Config(Learner.Config):
        decay: float = 0.95
        gamma: float = II("algorithm.gamma")
        """Discount of an agent's later rounds, for credit of kind ``reward``."""

    def __init__(self, config: Config, credit: Any) -> None:
        super().__init__(config, credit)
        self.means: dict[str, dict[str, list[float]]] = {}
        """By data source and agent: the discounted sum of returns, and of their weights."""

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        credit_ERA = self.credit.of(batch)
        if self.credit.kind != "advantage":
            credit_ERA = self.relative(batch, credit_ERA)
        for rows in batch.rows.values():
            rows["advantages"] = spread(credit_ERA, rows)
        return {
            f"agent/{agent}/baseline/{source}": total / weight
            for source, roles in self.means.items()
            for agent, (total, weight) in roles.items()
        }

    def relative(self, batch: JointBatch, credit_ERA: Tensor) -> Tensor:
        """Returns [E, R, A] less the mean of their role, which hears of them first."""
        mask_ERA, returns_ERA = batch.path().mask_ERA, returns(batch, credit_ERA, self.credit.kind, self.config.gamma)
        batch.returns_ERA, advantages_ERA = returns_ERA, torch.zeros_like(returns_ERA)
        for source in sorted(set(batch.sources_E)):
            of_game_E = torch.tensor([name == source for name in batch.sources_E])
            for a, agent in enumerate(batch.agents):
                spoke_ER = of_game_E[:, None] & mask_ERA[..., a]
                if spoke_ER.any():
                    mean = self.followed(source, agent, float(returns_ERA[..., a][spoke_ER].mean()))
                    compared_ER = of_game_E[:, None] & batch.mask_ERA[..., a]
                    advantages_ERA[..., a][compared_ER] = returns_ERA[..., a][compared_ER] - mean
        return advantages_ERA

    def followed(self, source: str, agent: str, value: float) -> float:
        """The role's mean after one more step's."""
        total, weight = self.means.setdefault(source, {}).setdefault(agent, [0.0, 0.0])
        kept, new = self.config.decay, 1 - self.config.decay
        total, weight = kept * total + new * value, kept * weight + new
        self.means[source][agent] = [total, weight]
        return total / weight

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.expect_state(state, ("means",))
        self.means = state["means"]
