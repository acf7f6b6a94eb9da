"""Packing: the turns that share a row. Pure."""

from collections.abc import Sequence

from marl.types import AgentId, PolicyName, Turn

Chain = list[tuple[Turn, int]]
"""Turns of one agent, each with its index in the flattened grid, that share a row."""


def chains_of(trained: Sequence[Chain], pack_turns: bool) -> dict[PolicyName, list[Chain]]:
    """Each policy's rows, from the trained turns of every episode in their order."""
    chains: dict[PolicyName, list[Chain]] = {}
    for entries in trained:
        last: dict[AgentId, Chain] = {}
        for turn, cell in entries:
            if pack_turns and turn.agent in last and continues(turn, last[turn.agent][-1][0]):
                last[turn.agent].append((turn, cell))
            else:
                last[turn.agent] = [(turn, cell)]
                chains.setdefault(turn.policy, []).append(last[turn.agent])
    return chains


def continues(turn: Turn, previous: Turn) -> bool:
    """True if a turn's prompt begins with the ids of the previous turn of the same policy."""
    return turn.policy == previous.policy and turn.extends(previous)
