"""RAE, role-conditioned advantages for self-play: a return relative to the moving mean of its game and role
(SPIRAL, arXiv:2506.24119)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import II
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners.base import Learner, broadcast_to_tokens, register_learner
from marl.learners.trajectories import returns
from marl.types import Metrics
from marl.utils.numbers import SHARE, Number, bounded


@register_learner("rae")
class RAE(Learner):
    """A = R - b, where b tracks R of the same game and role: b <- decay b + (1 - decay) R once per episode, corrected for its bias
    towards 0 in the first ones. A role's constant advantage, such as the first move, thus earns no credit.

    The game is the data source; the role is the agent and its place in the order in which agents first speak, so that, if
    seats are swapped, an agent has a separate mean for going first. R is the mean return of the agent's turns: the outcome, if
    they have no other reward. The episodes of a step update b by their mean, so that their order does not matter.
    """

    default_credit = "zero_sum"

    @dataclass
    class Config(Learner.Config):
        decay: float = bounded(0.95, Number(0, 0.9999))
        """Decay of the moving mean, per episode."""
        gamma: float = bounded(II("algorithm.gamma"), SHARE)
        """Discount of an agent's later rounds, for credit of kind ``reward``."""

    def __init__(self, config: Config, credit: Any) -> None:
        super().__init__(config, credit)
        self.means: dict[str, dict[str, dict[int, list[float]]]] = {}
        """By data source, agent and place: the discounted sum of returns, and of their weights."""

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        credit_ERA = self.credit.of(batch)
        if self.credit.kind != "advantage":
            credit_ERA = self.relative(batch, credit_ERA)
        for rows in batch.rows.values():
            rows["advantages"] = broadcast_to_tokens(credit_ERA, rows)
        return {
            f"agent/{agent}/baseline/{source}" + (f"/{place}" if len(places) > 1 else ""): total / weight
            for source, roles in self.means.items()
            for agent, places in roles.items()
            for place, (total, weight) in sorted(places.items())
        }

    def relative(self, batch: JointBatch, credit_ERA: Tensor) -> Tensor:
        """Returns [E, R, A] less their role's mean, which is updated first."""
        mask_ERA = batch.mask_ERA
        returns_ERA = returns(batch, credit_ERA, self.credit.kind, self.config.gamma)
        batch.returns_ERA = returns_ERA
        outcomes_EA = torch.where(mask_ERA, returns_ERA, 0.0).sum(1) / mask_ERA.sum(1).clamp(min=1)
        places_EA, baselines_EA = places(mask_ERA), torch.zeros_like(outcomes_EA)
        for source in sorted(set(batch.sources_E)):
            of_game_E = torch.tensor([name == source for name in batch.sources_E])
            for a, agent in enumerate(batch.agents):
                for place in places_EA[of_game_E, a].unique().tolist():
                    played_E = of_game_E & (places_EA[:, a] == place)
                    if place:
                        baselines_EA[played_E, a] = self.followed(source, agent, place, outcomes_EA[played_E, a])
        return torch.where(batch.spoken_ERA, returns_ERA - baselines_EA[:, None], 0.0)

    def followed(self, source: str, agent: str, place: int, outcomes_E: Tensor) -> float:
        """The role's mean after these episodes."""
        roles = self.means.setdefault(source, {}).setdefault(agent, {})
        total, weight = roles.get(place, [0.0, 0.0])
        kept = self.config.decay ** len(outcomes_E)
        total, weight = kept * total + (1 - kept) * float(outcomes_E.mean()), kept * weight + (1 - kept)
        roles[place] = [total, weight]
        return total / weight

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.expect_state(state, ("means",))
        self.means = state["means"]


def places(mask_ERA: Tensor) -> Tensor:
    """Each agent's place [E, A] in the order in which the agents of an episode first speak, from 1; those that begin in one
    round share a place. 0 for an agent that is silent."""
    first_EA, spoke_EA = mask_ERA.int().argmax(1), mask_ERA.any(1).long()
    begins_ER = torch.zeros(mask_ERA.shape[:2], dtype=torch.long).scatter_reduce(1, first_EA, spoke_EA, "amax")
    return begins_ER.cumsum(1).gather(1, first_EA) * spoke_EA
