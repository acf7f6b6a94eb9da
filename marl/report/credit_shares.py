"""Each agent's share of the credit, and a warning about agents that get next to none. Pure, over rows."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from marl.batch.joint import JointBatch
from marl.types import AgentId

logger = logging.getLogger(__name__)

WINDOW = 20
"""Steps over which a share is looked at."""


def credit_shares(batch: JointBatch, agents: Sequence[AgentId]) -> dict[AgentId, float]:
    """Share of the total |advantage| that these agents' trained turns got: the mean over a turn's tokens, summed over
    turns. Empty where nobody got any."""
    cells = batch.spoken_ERA.numel()
    size, tokens = torch.zeros(cells, dtype=torch.float64), torch.zeros(cells, dtype=torch.float64)
    for rows in batch.rows.values():
        index_T = rows["turn_index"].values()
        answered_T = index_T >= 0
        own_T = rows["advantages"].values()[answered_T].abs().double()
        size.index_add_(0, index_T[answered_T], own_T)
        tokens.index_add_(0, index_T[answered_T], torch.ones_like(own_T))
    size_A = (size / tokens.clamp(min=1)).view(batch.spoken_ERA.shape).sum((0, 1))
    total = float(sum(size_A[batch.agents.index(agent)] for agent in agents))
    return {agent: float(size_A[batch.agents.index(agent)]) / total for agent in agents} if total > 0 else {}


class LazyAgents:
    """Warns of an agent, once, whose share stays small: it hardly learns, and may have stopped contributing."""

    def __init__(self, fraction: float | None) -> None:
        """``fraction`` of an equal share, in the mean over the last steps; None for no warning."""
        self.fraction = fraction
        self.recent: deque[Mapping[AgentId, float]] = deque(maxlen=WINDOW)
        self.warned: set[AgentId] = set()

    def look(self, shares: Mapping[AgentId, float], step: int) -> None:
        """A step's shares; one without any tells nothing."""
        if shares:
            self.recent.append(shares)
        if self.fraction is None or len(self.recent) < WINDOW:
            return
        for agent in set(shares) - self.warned:
            mean = sum(past[agent] for past in self.recent) / WINDOW
            if mean < self.fraction / len(shares):
                self.warned.add(agent)
                logger.warning(
                    "agent %r got %.3f of the credit over the last %d steps, to step %d; an equal share is %.3f (warns "
                    "below %g times that: controller.lazy_agent_share). Look at agent/%s/credit_share and what it says",
                    agent, mean, WINDOW, step, 1 / len(shares), self.fraction, agent,
                )  # fmt: skip
