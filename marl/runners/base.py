"""A runner is the protocol by which agents talk: control flow over ``await agent.act(messages)``.

It knows no tokens, no rewards and no cluster, and it is a deterministic function of the answers it gets: whatever it
draws, it draws from ``episode.rng``.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from marl.types import AgentId, Episode, Message, Task, Turn, Verdict
from marl.utils.registry import Registry

T = TypeVar("T")
Judge = Callable[[Task, Turn], Awaitable[Verdict]]


class Generate(Protocol):
    """Turns an observation into a turn. ``previous`` is the agent's last turn, whose ids the observation may extend."""

    def __call__(
        self, agent: AgentId, observation: list[Message], round: int, previous: Turn | None
    ) -> Awaitable[Turn]: ...


class LiveEpisode:
    """What a runner sees of the episode it plays: the task, the agents, a source of randomness and a judge."""

    def __init__(
        self, record: Episode, generate: Generate, judge: Judge, seed: int, roles: Mapping[AgentId, str] | None = None
    ) -> None:
        self.record, self.task, self.rng = record, record.task, random.Random(seed)
        self.agents = [Agent(name, self, generate, (roles or {}).get(name, "")) for name in record.agents]
        self._judge = judge

    async def verdict(self, turn: Turn) -> Verdict:
        """The verdict on a turn, asked for once."""
        if turn.verdict is None:
            turn.verdict = await self._judge(self.task, turn)
        return turn.verdict

    def answer(self, turn: Turn) -> str | None:
        """The final answer that a turn's text gives."""
        return self.task.extract(turn.text)


class Agent:
    """A seat in one episode. Every :meth:`act` is one turn, recorded when it ends."""

    def __init__(self, name: AgentId, episode: LiveEpisode, generate: Generate, role: str = "") -> None:
        self.name, self.role, self._episode, self._generate = name, role, episode, generate
        self._rounds: set[int] = set()

    @property
    def turns(self) -> list[Turn]:
        return self._episode.record.trajectory(self.name)

    @property
    def prompt(self) -> list[Message]:
        """What the task shows this agent, its role after the question: agents share the longer prefix."""
        return with_role(self._episode.task.observation(self.name), self.role)

    @property
    def history(self) -> list[Message]:
        """The agent's last observation and its own answer: appending to it keeps the context append-only."""
        last = self.turns[-1]
        return [*last.observation, {"role": "assistant", "content": last.text}]

    async def act(self, observation: list[Message], round: int | None = None) -> Turn:
        """Answer an observation.

        ``round`` is 1 + the deepest turn that has ended, unless given. Raises ValueError if the agent has spoken in
        that round already: a turn grid holds one turn per (episode, round, agent).
        """
        record = self._episode.record
        round = record.num_rounds + 1 if round is None else round
        if round in self._rounds:
            raise ValueError(
                f"agent {self.name!r} acts twice in round {round}; give its second turn a round of its own"
            )
        self._rounds.add(round)
        previous = self.turns[-1] if self.turns else None
        turn = await self._generate(self.name, observation, round, previous)
        record.turns.append(turn)
        return turn


class Runner(ABC):
    """Override :meth:`run`. Facts about a runner are class attributes, so that nothing branches on its name."""

    debates: ClassVar[bool] = False
    """Agents read one another between rounds: transitions and persuasion are worth reporting."""

    @dataclass
    class Config:
        name: str

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    async def run(self, episode: LiveEpisode) -> str | None:
        """Play one episode and return the team's final answer, or None where it has none."""


async def together(turns: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Agents act at the same time; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(turn) for turn in turns]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def majority(answers: Sequence[str | None], rng: random.Random) -> str | None:
    """The most frequent answer; abstentions (None) do not count, ties are broken by the episode's seed."""
    counts = Counter(answer for answer in answers if answer is not None)
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    return rng.choice(sorted(best)) if best else None


def with_role(messages: list[Message], role: str) -> list[Message]:
    """An agent's first observation: its role after the question."""
    if not role:
        return messages
    *earlier, last = messages
    return [*earlier, {**last, "content": f"{last['content']}\n\n{role}"}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


RUNNERS: Registry[Runner] = Registry("runner")
register_runner = RUNNERS.register
