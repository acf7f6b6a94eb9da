"""Inputs of VDN and QMIX: each trained turn twice, before and after its answer, for the utilities;
and the joint observation of every round, for the mixer's state. A turn that was left out of training is read too, where the
same agent's of another sample are trained: they are compared with it.

An alternative that no conversation followed is part of no joint action, and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from marl.batch.critic_inputs import Encode, JointObservation, ValueRow, in_order, to_value_rows, turns_of
from marl.batch.joint import JointBatch
from marl.batch.values import UtilityRows
from marl.types import AgentId, CriticName, Episode
from marl.utils.ragged import jagged

if TYPE_CHECKING:
    from tensordict import TensorDict

SHARED = "utility"
"""The name of the one critic of ``learner.share_utilities``."""


@dataclass
class UtilityRow(ValueRow):
    answered: list[int] = field(default_factory=list)
    """1 where what is read stands at the end of the answer: q(h, y); 0 at the end of the observation: v(h)."""

    def read(self, cell: int, answered: int) -> None:
        self.read_at.append(len(self.ids) - 1)
        self.cells.append(cell)
        self.answered.append(answered)


class UtilityTurns:
    """v(h) at the last token of what the agent was shown, q(h, y) at the last of its answer; turns that extend one another
    share a row. A peer's text enters once the agent has been shown it.

    ``encode`` and ``answer`` are given where the critic has a tokenizer of its own: of an observation and of an answer's
    text. Without them the ids are those that the policy took and gave.
    """

    def __init__(
        self, shared: bool, encode: Encode | None = None, answer: Callable[[str], list[int]] | None = None
    ) -> None:
        self.shared, self.encode, self.answer = shared, encode, answer

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> UtilityRows:
        found: dict[CriticName, list[UtilityRow]] = {}
        open_rows: dict[tuple[int, AgentId, str], UtilityRow] = {}
        for e, turn, cell in turns_of(episodes, batch, batch.compared_ERA):
            if not turn.kept:
                continue
            shown = self.encode(turn.observation) if self.encode else turn.prompt_ids
            key = (e, turn.agent, turn.policy)
            row = open_rows.get(key)
            if row is None or shown[: len(row.ids)] != row.ids:
                row = open_rows[key] = UtilityRow([])
                found.setdefault(SHARED if self.shared else turn.policy, []).append(row)
            row.ids = list(shown)
            row.read(cell, answered=0)
            row.ids += self.answer(turn.text) if self.answer else turn.response_ids
            row.read(cell, answered=1)
        return UtilityRows({name: with_answered(rows) for name, rows in found.items()})


def with_answered(rows: Sequence[UtilityRow]) -> TensorDict:
    columns = to_value_rows(rows)
    columns["answered"] = jagged([row.answered for row in rows], torch.long)
    return columns


class JointStates:
    """The joint observation of every round that trained agents speak in, and who is about to speak, ragged [E * R, T]; empty
    for the other rounds. Never the ground truth, never a turn of the same round."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = JointObservation(tokenizer)

    def ids(self, episodes: Sequence[Episode], batch: JointBatch) -> Tensor:
        width = batch.spoken_ERA.shape[1]
        states: list[list[int]] = [[] for _ in range(len(episodes) * width)]
        for e, turn, _ in turns_of(episodes, batch, batch.compared_ERA):
            if turn.kept and not states[e * width + turn.round - 1]:
                states[e * width + turn.round - 1] = self._state(episodes[e], turn.round)
        return jagged(states, torch.long)

    def _state(self, episode: Episode, round: int) -> list[int]:
        ids = self.text.task(episode)
        for turn in in_order(episode, 1, round):
            ids += self.text.turn(turn)
        for turn in in_order(episode, round, round + 1):
            ids += self.text.speaker(turn.agent)
        return ids
