"""Critic inputs: the observation as ids, and the positions at which values are read.

*Local*: what the agent itself was shown. *Central*: the joint observation, that is the task, every agent's private
observation, the turns of earlier rounds, and whose turn it is. Never the ground truth, never a turn of the same round.

A value of a turn is read where the turn begins, so that a conversation is read once and not once a turn; values of tokens
are read before each token of a turn's answer, which takes a row a turn.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from marl.batch.joint import JointBatch
from marl.batch.values import TokenRows, TurnRows
from marl.types import AgentId, CriticName, Episode, Message, Turn
from marl.utils.cache import cached_by_bytes
from marl.utils.ragged import jagged

if TYPE_CHECKING:
    from tensordict import TensorDict

CENTRAL = "central"
"""The name of the critic that all agents share."""
Encode = Callable[[Sequence[Message]], list[int]]


@dataclass
class ValueRow:
    """One sequence; for every value read from it, the position and the cell of the turn grid."""

    ids: list[int]
    read_at: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)


def to_value_rows(rows: Sequence[ValueRow]) -> TensorDict:
    """Value rows of turns, with the keys that verl's engines read."""
    from tensordict import TensorDict  # heavy: a configuration is checked without it

    return TensorDict(
        {
            "input_ids": jagged([row.ids for row in rows], torch.long),
            "position_ids": jagged([range(len(row.ids)) for row in rows], torch.long),
            "read_at": jagged([row.read_at for row in rows], torch.long),
            "turn_index": jagged([row.cells for row in rows], torch.long),
        },
        batch_size=[len(rows)],
    )


def trained_turns(episodes: Sequence[Episode], batch: JointBatch) -> Iterator[tuple[int, Turn, int]]:
    """Episode, turn and cell of every turn that is trained, in the order of (episode, agent, round)."""
    return turns_of(episodes, batch, batch.trained_ERA)


def turns_of(
    episodes: Sequence[Episode], batch: JointBatch, chosen_ERA: torch.Tensor
) -> Iterator[tuple[int, Turn, int]]:
    """Episode, turn and cell of the chosen turns, in the order of (episode, agent, round)."""
    column = {agent: a for a, agent in enumerate(batch.agents)}
    chosen = chosen_ERA.flatten().tolist()
    for e, (episode, cells) in enumerate(zip(episodes, batch.cells, strict=True)):
        placed = [(turn, cell) for turn, cell in zip(episode.turns, cells, strict=True) if cell >= 0 and chosen[cell]]
        for turn, cell in sorted(placed, key=lambda pair: (column[pair[0].agent], pair[0].round, pair[0].branch)):
            yield e, turn, cell


class LocalTurns:
    """A value of every turn from the agent's own observation; turns whose observations extend one another share a row.

    ``encode`` is given where the critic has a tokenizer of its own; without it the ids are those that the policy took.
    """

    def __init__(self, encode: Encode | None = None) -> None:
        self.encode = encode

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> TurnRows:
        found: dict[CriticName, list[ValueRow]] = {}
        open_rows: dict[tuple[int, AgentId, str], ValueRow] = {}
        for e, turn, cell in trained_turns(episodes, batch):
            ids = self.encode(turn.observation) if self.encode else turn.prompt_ids
            key = (e, turn.agent, turn.policy)
            row = open_rows.get(key)
            if row is None or ids[: len(row.ids)] != row.ids:
                row = open_rows[key] = ValueRow([])
                found.setdefault(turn.policy, []).append(row)
            row.ids = list(ids)
            row.read_at.append(len(ids) - 1)
            row.cells.append(cell)
        return TurnRows({name: to_value_rows(rows) for name, rows in found.items()})


class LocalTokens:
    """A value before every token of an answer: the critic reads the policy's own rows."""

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> TokenRows:
        return TokenRows({name: token_rows(rows["prompts"].unbind(), rows) for name, rows in batch.rows.items()})


def token_rows(prompts: Sequence[torch.Tensor], rows: TensorDict) -> TensorDict:
    """The rows' responses after these prompts, read one position before every token of a response."""
    from tensordict import TensorDict  # heavy: a configuration is checked without it

    responses = rows["responses"].unbind()
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    reads = [torch.arange(len(p) - 1, len(p) + len(r) - 1) for p, r in zip(prompts, responses, strict=True)]
    columns = {"input_ids": ids, "position_ids": [torch.arange(len(row)) for row in ids], "read_at": reads}
    return TensorDict(
        {key: torch.nested.as_nested_tensor(list(parts), layout=torch.jagged) for key, parts in columns.items()},
        batch_size=[len(ids)],
    )


class JointObservation:
    """Writes the joint observation as plain text, piece by piece, with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []

        def encode(text: str) -> array:
            return array("i", tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

        self.encode = cached_by_bytes(encode, sys.getsizeof)

    def task(self, episode: Episode) -> list[int]:
        """Ids of the shared prompt, then of each agent's private observation."""
        shared = "\n\n".join(message["content"] for message in episode.task.messages)
        ids = [*self.start, *self.encode(shared)]
        for agent in episode.agents:
            own = episode.task.observation(agent)
            if own != episode.task.messages:
                text = "\n\n".join(message["content"] for message in own)
                ids += self.encode(f"\n\n{agent} has\n{text}")
        return ids

    def turn(self, turn: Turn) -> array:
        return self.encode(f"\n\n{turn.agent} said\n{turn.text}")

    def speaker(self, agent: AgentId) -> array:
        return self.encode(f"\n\n{agent}")


class CentralTurns:
    """A value of every turn from the joint observation: the transcript is read once an episode, and before each round the
    critic meets the name of every agent that is about to speak."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = JointObservation(tokenizer)

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> TurnRows:
        cells: dict[int, list[tuple[Turn, int]]] = {}
        for e, turn, cell in trained_turns(episodes, batch):
            cells.setdefault(e, []).append((turn, cell))
        rows = [self._row(episodes[e], trained) for e, trained in cells.items()]
        return TurnRows({CENTRAL: to_value_rows(rows)} if rows else {})

    def _row(self, episode: Episode, trained: Sequence[tuple[Turn, int]]) -> ValueRow:
        row = ValueRow(self.text.task(episode))
        for r in sorted({turn.round for turn, _ in trained}):
            row.ids += [i for turn in between(episode, trained, r) for i in self.text.turn(turn)]
            read_at: dict[AgentId, int] = {}
            for turn, cell in trained:
                if turn.round == r:
                    if turn.agent not in read_at:  # its alternatives start from the same state
                        row.ids += self.text.speaker(turn.agent)
                        read_at[turn.agent] = len(row.ids) - 1
                    row.read_at.append(read_at[turn.agent])
                    row.cells.append(cell)
        return row


def between(episode: Episode, trained: Sequence[tuple[Turn, int]], round: int) -> list[Turn]:
    """The turns that come between the previous round whose values are read and this one, in a fixed order."""
    previous = max((turn.round for turn, _ in trained if turn.round < round), default=0)
    return in_order(episode, previous, round)


def in_order(episode: Episode, first: int, last: int) -> list[Turn]:
    """The turns of rounds [first, last), by round and seat: never by who happened to answer first."""
    seats = {agent: a for a, agent in enumerate(episode.agents)}
    turns = [turn for turn in episode.path if first <= turn.round < last]
    return sorted(turns, key=lambda turn: (turn.round, seats[turn.agent]))


class CentralTokens:
    """A value before every token of an answer, read after the joint observation: a row a turn, in the agents' tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = JointObservation(tokenizer)

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> TokenRows:
        observations = {cell: self._observation(episodes[e], turn) for e, turn, cell in trained_turns(episodes, batch)}
        parts = []
        for rows in batch.rows.values():
            cells = [int(index[index >= 0][0]) for index in rows["turn_index"].unbind()]
            parts.append(token_rows([torch.tensor(observations[cell]) for cell in cells], rows))
        return TokenRows({CENTRAL: stacked(parts)} if parts else {})

    def _observation(self, episode: Episode, turn: Turn) -> list[int]:
        earlier = [i for before in in_order(episode, 1, turn.round) for i in self.text.turn(before)]
        return [*self.text.task(episode), *earlier, *self.text.speaker(turn.agent)]


def stacked(parts: Sequence[TensorDict]) -> TensorDict:
    """The rows of several batches as one."""
    from tensordict import TensorDict  # heavy: a configuration is checked without it

    columns = {
        key: torch.nested.as_nested_tensor([row for part in parts for row in part[key].unbind()], layout=torch.jagged)
        for key in list(parts[0].keys())
    }
    return TensorDict(columns, batch_size=[sum(len(part) for part in parts)])
