"""Examples: the turns that a method trains, and the rows that they make. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from marl.batch.packing import Chain, chains_of
from marl.types import AgentId, Message, Metrics, PolicyName, Turn

if TYPE_CHECKING:
    from tensordict import TensorDict

Side = list[Turn]
Speakers = Mapping[AgentId, Sequence[PolicyName]]
"""The trained agents, each with its policies of rounds 1, 2, …; the last one holds for all later rounds too."""


@dataclass(frozen=True)
class Example:
    """One side whose turns are imitated, with others of peers' turns that are predicted, or two: the chosen one and the rejected one.
    Turns may lack ids, until they are encoded."""

    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Selection:
    """Examples made of episodes, and counts of what was left out."""

    examples: list[Example]
    metrics: Metrics = field(default_factory=dict)


def policy_rows(examples: Sequence[Example], pack: bool | Collection[PolicyName]) -> dict[PolicyName, TensorDict]:
    """Each policy's rows with verl's keys, and for every row the number of its example and its side (0 the first).
    With ``pack``, for all policies or for these, turns of a side that extend one another share a row."""
    chains: dict[PolicyName, list[tuple[Chain, int, int]]] = {}
    for number, example in enumerate(examples):
        for index, side in enumerate(example.sides):
            for policy, found in chains_of([[(turn, number) for turn in side]], pack).items():
                chains.setdefault(policy, []).extend((chain, number, index) for chain in found)
    return {policy: rows_of_chains(own) for policy, own in chains.items()}


def rows_of_chains(chains: Sequence[tuple[Chain, int, int]]) -> TensorDict:
    from marl.batch.build import to_rows  # heavy: a configuration is checked without it

    agents = {turn.agent for chain, _, _ in chains for turn, _ in chain}
    rows = to_rows([chain for chain, _, _ in chains], dict.fromkeys(agents, 1.0))
    rows["example"] = torch.tensor([number for _, number, _ in chains])
    rows["side"] = torch.tensor([index for _, _, index in chains])
    return rows


def encode(turn: Turn, previous: Turn | None, encoder: Any) -> Turn:
    """Give a turn of text the ids that its policy would have taken and given. ``previous``: the agent's turn before it."""
    if not turn.prompt_ids:
        turn.prompt_ids = encoder.encode(turn.observation, previous)
    if not turn.response_ids:
        turn.response_ids = encoder.reply(turn.text, turn.prompt_ids, turn.thought)
        turn.response_mask, turn.log_probs = [1] * len(turn.response_ids), [0.0] * len(turn.response_ids)
    return turn


def encoded(example: Example, encoders: Mapping[PolicyName, Any]) -> Example:
    """The example with ids, each turn in its policy's tokenizer."""
    for side in example.sides:
        before: dict[tuple[AgentId, PolicyName], Turn] = {}
        for turn in side:
            key = turn.agent, turn.policy
            before[key] = encode(turn, before.get(key), encoders[turn.policy])
    return example


def without_long_turns(examples: Sequence[Example], limits: Mapping[PolicyName, int]) -> tuple[list[Example], int]:
    """The examples without turns of more tokens than their policy reads, and the number of these: texts of other agents."""
    turns = [turn for example in examples for side in example.sides for turn in side]
    long = {id(turn) for turn in turns if len(turn.prompt_ids) + len(turn.response_ids) > limits[turn.policy]}
    return without_turns(examples, long), len(long)


def without_turns(examples: Sequence[Example], left_out: Collection[int]) -> list[Example]:
    """The examples without the turns of these identities, and without those that are empty then."""
    kept = [Example(tuple([t for t in side if id(t) not in left_out] for side in e.sides)) for e in examples]
    return [example for example in kept if any(example.sides)]


def replies(messages: Sequence[Message], agent: AgentId, policy: PolicyName) -> Side:
    """A turn for every message of the assistant, after the messages before it."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        Turn(agent, number, list(messages[:i]), messages[i]["content"], policy=policy)
        for number, i in enumerate(places, start=1)
    ]


def distinct(examples: Sequence[Example]) -> list[Example]:
    """The examples without those that would train a policy twice on the same texts."""
    found: dict[Any, Example] = {}
    for example in examples:
        texts = [[(turn.policy, turn.observation, turn.text) for turn in side] for side in example.sides]
        found.setdefault(repr(texts), example)
    return list(found.values())
