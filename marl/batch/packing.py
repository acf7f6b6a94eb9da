"""Packing: the policies whose turns share rows (``controller.pack_turns``), and the turns that share one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from marl.config.packing import packs_by_default
from marl.config.policies import own_settings, trained_policies
from marl.config.schema import PackTurns
from marl.types import AgentId, PolicyName, Turn

if TYPE_CHECKING:
    from marl.batch.critic_spec import CriticSpec

Chain = list[tuple[Turn, int]]
"""Turns of one agent, each with its index in the flattened grid, that share a row."""


def packed_policies(config: Any, critics: CriticSpec | None) -> frozenset[PolicyName]:
    """The trained policies whose rows hold several turns where these extend one another; the others have a row a turn."""
    wanted, names = PackTurns.of(config), trained_policies(config.agents)
    if wanted is PackTurns.true:  # what forbids it was refused
        return frozenset(names)
    if wanted is PackTurns.false or (critics and critics.packing_obstacle(config)):
        return frozenset()
    return frozenset(name for name in names if packs_by_default(config.algorithm, own_settings(config, name)))


def chains_of(trained: Sequence[Chain], pack_turns: bool | Collection[PolicyName]) -> dict[PolicyName, list[Chain]]:
    """Each policy's rows, from the trained turns of every episode in their order."""
    chains: dict[PolicyName, list[Chain]] = {}
    for entries in trained:
        own: dict[AgentId, list[Chain]] = {}
        for turn, cell in entries:
            packs = pack_turns if isinstance(pack_turns, bool) else turn.policy in pack_turns
            chain = chain_of(turn, own.get(turn.agent, [])) if packs else None
            if chain is None:
                chain = []
                own.setdefault(turn.agent, []).append(chain)
                chains.setdefault(turn.policy, []).append(chain)
            chain.append((turn, cell))
    return chains


def chain_of(turn: Turn, chains: Sequence[Chain]) -> Chain | None:
    """The latest of an agent's chains whose last turn, of the same policy, the turn's prompt extends; None without one. It need
    not end with the agent's last turn, which may be an alternative that the conversation did not follow."""
    return next((chain for chain in reversed(chains) if continues(turn, chain[-1][0])), None)


def continues(turn: Turn, previous: Turn) -> bool:
    """True if a turn's prompt begins with the ids of the previous turn of the same policy."""
    return turn.policy == previous.policy and turn.extends(previous)
