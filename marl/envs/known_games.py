"""Games that are there: tables of payoffs, and games that are described by what their actions mean."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl.envs.games import Game, Joint, Repeated, register_game
from marl.utils.numbers import FINITE, WHOLE, bounded
from marl.utils.registry import did_you_mean

TABLES: dict[str, list] = {
    # 1 iff the two differ; [[1, 0], [0, 1]] is the same game with one agent's actions renamed
    "xor": [[0, 1], [1, 0]],
    # HAPPO (arXiv:2109.11251): from (.7, .7) both best responses at once give -1, one after the other 2
    "happo": [[0, 2], [2, -1]],
    # a sum over actions: 0 or 2 for the first agent, 0 or 1 for the second
    "additive": [[0, 1], [2, 3]],
    # Claus and Boutilier (1998): the best outcomes lie next to the worst
    "climbing": [[11, -30, 0], [-30, 7, 6], [0, 0, 5]],
    "penalty": [[10, 0, -100], [0, 2, 0], [-100, 0, 10]],
}
"""Common payoffs of two agents, by name: ``TABLES[name][first agent's action][second agent's]``."""


@register_game("matrix")
class Matrix(Repeated):
    """Any table: ``payoffs[a_0][a_1]…`` with one axis per agent and one entry per action.

    An entry is one common payoff, or a list with a payoff per agent.
    """

    team_size = (1, None)

    @dataclass
    class Config(Repeated.Config):
        payoffs: Any = "xor"
        """The table, or the name of one of ``TABLES``."""

    config: Config

    def check(self) -> None:
        table = self.config.payoffs
        if isinstance(table, str):
            if table not in TABLES:
                known = ", ".join(TABLES)
                raise ValueError(
                    f"runner.game.payoffs={table}: no such table; known: {known}.{did_you_mean(table, TABLES)}"
                )
            table = TABLES[table]
        self.table, self.num_actions = table, len(table)
        self.numbers = list(entries(table, [self.num_actions] * self.num_agents, self.num_agents))

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.numbers), max(self.numbers)

    def stage(self, joint: Joint) -> list[float]:
        entry: Any = self.table
        for action in joint:
            entry = entry[action]
        return [float(payoff) for payoff in entry] if isinstance(entry, list) else [float(entry)] * self.num_agents


def entries(table: Any, axes: Sequence[int], num_agents: int) -> Iterator[float]:
    """All numbers of a payoff table with these axes. Raises ValueError for another shape."""
    if not axes and isinstance(table, list) and len(table) == num_agents:
        yield from (number for payoff in table for number in entries(payoff, (), 0))
    elif not axes and isinstance(table, int | float):
        yield float(table)
    elif axes and isinstance(table, list) and len(table) == axes[0]:
        for part in table:
            yield from entries(part, axes[1:], num_agents)
    else:
        wanted = (
            f"a list of {axes[0]}" if axes else f"a number, or a list of {num_agents}" if num_agents else "a number"
        )
        raise ValueError(
            f"runner.game.payoffs holds {str(table)[:60]} where {wanted} was expected: one axis an agent, all of as many entries "
            "as there are actions, and in it one number for all or one an agent"
        )


@register_game("halves")
class Halves(Repeated):
    """1 for all where the first half of the agents plays 0 and the rest 1, or the reverse; else 0 (HATRPO, arXiv:2109.11251,
    Proposition 1). Separate policies reach 1, agents that share one policy 2 / 2^n of it."""

    bounds = (0.0, 1.0)

    def stage(self, joint: Joint) -> list[float]:
        half = self.num_agents // 2
        parts = set(joint[:half]), set(joint[half:])
        return [float(parts in (({0}, {1}), ({1}, {0})))] * self.num_agents


@register_game("collaborate")
class Collaborate(Repeated):
    """Collaborate (0) or act alone (1), after MAPoRL's analysis (arXiv:2502.18439), as a stag hunt of n agents.

    Acting alone yields ``r_ind``, whatever the others do. Collaborating yields ``r_syn`` if at least ``enough`` agents do, and
    ``r_col`` < ``r_ind`` < ``r_syn`` if fewer do. All alone and all together are equilibria, and the second is better for
    everyone; an agent trained against peers that act alone learns to act alone.
    """

    @dataclass
    class Config(Repeated.Config):
        r_syn: float = bounded(1.0, FINITE)
        """Payoff of collaborating where enough do."""
        r_ind: float = bounded(0.6, FINITE)
        """Payoff of acting alone."""
        r_col: float = bounded(0.0, FINITE)
        """Payoff of collaborating where too few do."""
        enough: int | None = bounded(None, WHOLE.or_null())
        """So many collaborate, oneself included; null: all."""

    config: Config

    def check(self) -> None:
        config, self.enough = self.config, self.config.enough or self.num_agents
        if not config.r_col < config.r_ind < config.r_syn:
            raise ValueError(
                f"runner.game: r_col={config.r_col:g}, r_ind={config.r_ind:g}, r_syn={config.r_syn:g}; expected r_col < r_ind < r_syn"
            )
        if not 2 <= self.enough <= self.num_agents:
            raise ValueError(
                f"runner.game.enough={config.enough}: expected 2 to {self.num_agents}, the number of agents; null for all"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return self.config.r_col, self.config.r_syn

    def stage(self, joint: Joint) -> list[float]:
        config = self.config
        together = config.r_syn if joint.count(0) >= self.enough else config.r_col
        return [together if action == 0 else config.r_ind for action in joint]


@register_game("two_step")
class TwoStep(Game):
    """The two-step game of QMIX (arXiv:1803.11485): the first agent's action, which has no payoff, selects the table that
    both play next."""

    team_size = (2, 2)
    num_stages = 2

    @dataclass
    class Config(Game.Config):
        payoffs: list[Any] = field(default_factory=lambda: [[[7, 7], [7, 7]], [[0, 1], [1, 8]]])
        """A table of common payoffs for each action of the first agent."""

    config: Config

    def check(self) -> None:
        self.num_actions = len(self.config.payoffs)
        self.numbers = list(entries(self.config.payoffs, [self.num_actions] * 3, 0))

    @property
    def bounds(self) -> tuple[float, float]:
        return min(0.0, *self.numbers), max(0.0, *self.numbers)  # 0: the first stage

    def actors(self, earlier: Sequence[Joint]) -> list[int]:
        return [0, 1] if earlier else [0]

    def turns(self, seat: int) -> int:
        return 2 - seat

    def payoffs(self, joint: Joint, earlier: Sequence[Joint]) -> list[float]:
        if not earlier:
            return [0.0, 0.0]
        entry: Any = self.config.payoffs
        for action in (earlier[0][0], *joint):
            entry = entry[action]
        return [float(entry)] * 2
