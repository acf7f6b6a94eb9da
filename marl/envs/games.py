"""Games: which seats act at a stage, and the payoffs of a joint action. Pure functions of earlier stages.

A seat is an agent's place in the team and an action its number in the game, both from 0. At every stage some seats act at
the same time; a payoff belongs to its stage, whether the seat acts or is idle, and a seat's total in a game is their sum.
"""

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from marl.utils.numbers import FINITE, Number, bounded, count
from marl.utils.registry import Registry, typed

Joint: TypeAlias = tuple[int | None, ...]
"""One action a seat at one stage; None where the seat does not act."""

LEAD = "lead"
"""Evidence on a seat's last turn: its total payoff less the mean of the others'."""
DIVISOR = Number(0, above=True, expected="payoffs are divided by it; expected a number above 0")


class Game(ABC):
    """Override :meth:`payoffs`, ``bounds`` and whatever else differs: ``num_stages``, :meth:`actors`, :meth:`seen`, :meth:`check`."""

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
        """Payoff of a stage for all acting agents if a text names no action, at most the game's lowest payoff; null: that one."""
        scale: float = bounded(1.0, DIVISOR)
        """Payoffs are divided by it. Reports count a score of ``judge.right_at`` (1) or more as right: choose the best payoff."""

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
        if config.invalid is not None and config.invalid > self.bounds[0]:
            raise ValueError(
                f"runner.game.invalid={config.invalid:g}: expected at most {self.bounds[0]:g}, the lowest payoff of the game, or naming "
                "no action would pay; null for that payoff"
            )
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
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest payoff of a seat at one stage, acting or idle."""

    @abstractmethod
    def payoffs(self, joint: Joint, earlier: Sequence[Joint]) -> list[float]:
        """Payoff per seat of a stage, idle ones included, given these actions and those of earlier stages."""

    def actors(self, earlier: Sequence[Joint]) -> list[int]:
        """The seats that act at the next stage; none once the game is over early."""
        return list(range(self.num_agents))

    def seen(self, seat: int, earlier: Sequence[Joint]) -> list[int]:
        """The other seats whose actions of the last stage this one sees before it acts."""
        return [other for other, action in enumerate(earlier[-1]) if action is not None and other != seat]

    def turns(self, seat: int) -> int:
        """Maximum number of actions of a seat."""
        return self.num_stages

    def action(self, text: str) -> int | None:
        """The action that a text names, the last one if it names several; None where it names none.

        Case is ignored unless it alone tells two words apart; ``-1`` and ``1.5`` do not name action 1.
        """
        case = re.IGNORECASE if len({word.casefold() for word in self.words}) == len(self.words) else re.NOFLAG
        named = [
            (match.end(), len(word), action)
            for action, word in enumerate(self.words)
            for match in re.finditer(
                rf"(?<!\w)(?<![-\u2212](?=\d))(?<!\d[.,]){re.escape(word)}(?!\w|[.,]\d)", text, case
            )
        ]
        return max(named)[2] if named else None

    def word(self, action: int | None) -> str | None:
        return None if action is None else self.words[action]

    def outcome(self, said: Mapping[int, str], earlier: Sequence[Joint]) -> tuple[Joint, list[float]]:
        """Joint action and each seat's scaled payoff, from the texts of the seats that act.

        If a text names no action, the game ends. All acting seats get ``invalid`` for this stage and every remaining one, idle
        seats the game's lowest payoff, so that leaving a costly game never helps.
        """
        named = {seat: self.action(text) for seat, text in said.items()}
        joint = tuple(named.get(seat) for seat in range(self.num_agents))
        if None in named.values():
            idle = self.bounds[0] * self.stages_left(len(earlier))
            return joint, [self.forfeit(len(earlier)) if seat in said else idle for seat in range(self.num_agents)]
        return joint, [payoff / self.config.scale for payoff in self.payoffs(joint, earlier)]

    def stages_left(self, played: int) -> float:
        """Number of remaining stages, in units of the scale."""
        return (self.num_stages - played) / self.config.scale

    @property
    def invalid(self) -> float:
        return self.bounds[0] if self.config.invalid is None else self.config.invalid

    def forfeit(self, played: int) -> float:
        """Scaled payoff of a seat for the remaining stages of a game that ended early."""
        return self.invalid * self.stages_left(played)

    def leads(self, totals: Sequence[float], silent: Collection[int], played: int) -> list[float]:
        """Each seat's total in the stages played less the mean of the others'; they sum to 0.

        Seats that named no action lose in addition the most that a seat can lose in the remaining stages, which the others
        share. If no other is left, all lose, and the sum is below 0.
        """
        loss = (self.bounds[1] - self.invalid) * self.stages_left(played) if silent else 0.0
        others = max(1, self.num_agents - 1)
        winners = max(1, self.num_agents - len(silent))
        return [
            total - (sum(totals) - total) / others + (-loss if seat in silent else loss * len(silent) / winners)
            for seat, total in enumerate(totals)
        ]


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
        """Number of times that the game is played in an episode."""

    config: Config

    def __init__(self, config: Config, num_agents: int) -> None:
        super().__init__(config, num_agents)
        self.num_stages = config.rounds

    @abstractmethod
    def stage(self, joint: Joint) -> list[float]:
        """Payoff of each seat for these actions."""

    def payoffs(self, joint: Joint, earlier: Sequence[Joint]) -> list[float]:
        return self.stage(joint)
