"""Games: which seats act at a stage, and the payoffs of a joint action. Pure functions of earlier stages.

A seat is an agent's place in the team and an action its number in the game, both from 0. At every stage some seats act at
the same time; a payoff belongs to its stage, and a seat's total in a game is their sum.
"""

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from marl.utils.numbers import FINITE, WHOLE, Number, bounded, count
from marl.utils.registry import Registry, did_you_mean, typed

Joint: TypeAlias = tuple[int | None, ...]
"""One action a seat at one stage; None where the seat does not act."""

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


DIVISOR = Number(0, above=True, expected="payoffs are divided by it; expected a number above 0")


class Game(ABC):
    """Override :meth:`payoffs`, ``worst`` and whatever else differs: ``num_stages``, :meth:`actors`, :meth:`seen`, :meth:`check`."""

    team_size: ClassVar[tuple[int, int | None]] = (2, None)
    """Minimum and maximum number of agents; None for no limit."""
    num_stages: int = 1
    num_actions: int = 2

    @dataclass
    class Config:
        name: str
        actions: list[str] | None = None
        """The words of the actions; null: 0, 1, …"""
        invalid: float | None = bounded(None, FINITE.or_null())
        """Payoff of a stage for all acting agents if a text names no action; null: the game's lowest payoff."""
        scale: float = bounded(1.0, DIVISOR)
        """Payoffs are divided by it. Reports count a score of 1 or more as right: choose the best payoff."""

    def __init__(self, config: Config, num_agents: int) -> None:
        """Raises ValueError if this number of agents cannot play it, or if its keys contradict one another."""
        self.config, self.num_agents = config, num_agents
        low, high = self.team_size
        if num_agents < low or (high is not None and num_agents > high):
            wanted = f"{low}" if high == low else f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(
                f"runner.game.name={config.name} is played by {wanted} agents, and agents names {num_agents}"
            )
        self.check()
        self.words = config.actions or [str(action) for action in range(self.num_actions)]
        if len(set(self.words)) != self.num_actions or not all(self.words):
            raise ValueError(
                f"runner.game.actions={self.words}: expected {self.num_actions} different words, one an action; null for 0, 1, …"
            )

    def check(self) -> None:
        """Raise ValueError if the configuration is not valid for this game."""
        return None

    @property
    @abstractmethod
    def worst(self) -> float:
        """The lowest payoff of a seat at one stage."""

    @abstractmethod
    def payoffs(self, joint: Joint, earlier: Sequence[Joint]) -> list[float]:
        """Payoff per seat of a stage, given these actions and those of earlier stages; 0 for a seat that is idle."""

    def actors(self, earlier: Sequence[Joint]) -> list[int]:
        """The seats that act at the next stage."""
        return list(range(self.num_agents))

    def seen(self, seat: int, earlier: Sequence[Joint]) -> list[int]:
        """The other seats whose actions of the last stage this one sees before it acts."""
        return [other for other, action in enumerate(earlier[-1]) if action is not None and other != seat]

    def turns(self, seat: int) -> int:
        """Maximum number of actions of a seat."""
        return self.num_stages

    def action(self, text: str) -> int | None:
        """The action that a text names, the last one if it names several; None where it names none."""
        named = [
            (match.end(), len(word), action)
            for action, word in enumerate(self.words)
            for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)
        ]
        return max(named)[2] if named else None

    def word(self, action: int | None) -> str | None:
        return None if action is None else self.words[action]

    def outcome(self, said: Mapping[int, str], earlier: Sequence[Joint]) -> tuple[Joint, list[float]]:
        """Joint action and each seat's scaled payoff, from the texts of the seats that act.

        If a text names no action, the game ends and all acting seats get ``invalid`` for this stage and every
        remaining one, so that leaving a costly game never helps.
        """
        named = {seat: self.action(text) for seat, text in said.items()}
        joint = tuple(named.get(seat) for seat in range(self.num_agents))
        if None in named.values():
            total = self.forfeit(len(earlier))
            return joint, [total if seat in said else 0.0 for seat in range(self.num_agents)]
        return joint, [payoff / self.config.scale for payoff in self.payoffs(joint, earlier)]

    def forfeit(self, played: int) -> float:
        """Scaled payoff of a seat for the remaining stages of a game that ended early."""
        invalid = self.worst if self.config.invalid is None else self.config.invalid
        return invalid * (self.num_stages - played) / self.config.scale


GAMES: Registry[Game] = Registry("game")
register_game = GAMES.register


def make_game(options: Mapping[str, Any], num_agents: int) -> Game:
    """The game that ``runner.game`` describes. Raises ValueError for unknown names, keys and values of another type."""
    return built(json.dumps(options, sort_keys=True), GAMES.described("runner.game", options), num_agents)


@functools.lru_cache(maxsize=64)  # every episode asks for it, and reading a configuration costs more than playing
def built(options: str, cls: type[Game], num_agents: int) -> Game:
    return cls(typed("runner.game", cls.Config, json.loads(options)), num_agents)


class Repeated(Game):
    """One stage game, played ``rounds`` times. Override :meth:`stage`."""

    @dataclass
    class Config(Game.Config):
        rounds: int = bounded(1, count(expected="expected at least 1"))

    config: Config

    def __init__(self, config: Config, num_agents: int) -> None:
        super().__init__(config, num_agents)
        self.num_stages = config.rounds

    @abstractmethod
    def stage(self, joint: Joint) -> list[float]:
        """Payoff of each seat for these actions."""

    def payoffs(self, joint: Joint, earlier: Sequence[Joint]) -> list[float]:
        return self.stage(joint)


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
    def worst(self) -> float:
        return min(self.numbers)

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

    worst = 0.0

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
        r_ind: float = bounded(0.6, FINITE)
        r_col: float = bounded(0.0, FINITE)
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
    def worst(self) -> float:
        return self.config.r_col

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
    def worst(self) -> float:
        return min(self.numbers)

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
