"""The critics of a run: their workers, and what they read."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDict

from marl.controller.chat import ChatEncoder
from marl.controller.critic_group import CriticGroup
from marl.learners.values import place_values
from marl.modules.critics.observation import CentralTokens, CentralTurns, LocalTokens, LocalTurns
from marl.modules.critics.utilities import JointStates, UtilityTurns
from marl.types import CriticName, Episode, JointBatch


class Reader(Protocol):
    """Makes of a step's episodes the rows of every critic."""

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> dict[CriticName, TensorDict]: ...


def reader(kind: str, level: str, tokenizer: Any, encoder: ChatEncoder | None, shared: bool = False) -> Reader:
    """What critics of a kind (local, central, utility) and level (turn, token) read.

    ``encoder`` is that of a tokenizer of the critic's own; None where it has the policies'. ``shared``: one utility for all.
    """
    if kind == "utility":
        return UtilityTurns(shared, encoder.encode, encoder.answer) if encoder else UtilityTurns(shared)
    if kind == "local":
        return LocalTurns(encoder.encode if encoder else None) if level == "turn" else LocalTokens()
    return CentralTurns(tokenizer) if level == "turn" else CentralTokens(tokenizer)


class Critics:
    """None of them, where the learner has no critic."""

    def __init__(
        self,
        groups: Mapping[CriticName, CriticGroup],
        reader: Reader | None = None,
        states: JointStates | None = None,
    ) -> None:
        """``states`` where the learner reads the joint observation itself."""
        self.groups, self.reader, self.states = groups, reader, states

    async def value(self, episodes: Sequence[Episode], batch: JointBatch) -> None:
        """Let every critic value what it reads, all at the same time; the values lie in the batch then."""
        if self.reader is None:
            return
        batch.value_rows = self.reader.rows(episodes, batch)
        if self.states is not None:
            batch.joint_ids = self.states.ids(episodes, batch)
        names = list(batch.value_rows)
        results = await asyncio.gather(*(self.groups[name].compute_values(batch.value_rows[name]) for name in names))
        for name, values in zip(names, results, strict=True):
            place_values(batch, name, values)
