"""A runner is the protocol by which agents talk: control flow over ``await agent.act(messages)``.

It knows no tokens, no rewards and no cluster, and it is a deterministic function of the answers it gets: whatever it
draws, it draws from ``episode.rng``.
"""

import asyncio
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from marl.runners.context import ContextOverflow, Overflow, drop_oldest, to_summarise, with_summary
from marl.types import AgentId, Episode, Message, Task, Turn, Verdict
from marl.utils.registry import Registry, did_you_mean

T = TypeVar("T")
Judge = Callable[[Task, Turn], Awaitable[Verdict]]


class Generate(Protocol):
    """Turns an observation into a turn. ``previous`` is the agent's last turn, whose ids the observation may extend;
    ``branch`` tells alternatives of one (agent, round) apart. Raises ContextOverflow for too long an observation."""

    def __call__(
        self, agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
    ) -> Awaitable[Turn]: ...


class TooManyTurns(ValueError):
    """A runner lets an agent speak more often than its ``most_turns`` says, by which a run is planned."""


class LiveEpisode:
    """What a runner sees of the episode it plays: the task, the agents, a source of randomness and a judge."""

    def __init__(
        self,
        record: Episode,
        generate: Generate,
        judge: Judge,
        roles: Mapping[AgentId, str] | None = None,
        overflow: Overflow = Overflow.refuse,
    ) -> None:
        self.record, self.task, self.rng = record, record.task, random.Random(record.seed)
        self.agents = [Agent(name, self, generate, (roles or {}).get(name, ""), overflow) for name in record.agents]
        self._judge = judge
        self.runner = ""
        self.limits: Mapping[AgentId, int] | None = None
        """How often each agent may speak; None for no limit."""

    def agent(self, name: AgentId) -> "Agent":
        return next(agent for agent in self.agents if agent.name == name)

    async def verdict(self, turn: Turn) -> Verdict:
        """The verdict on a turn, asked for once."""
        if turn.verdict is None:
            turn.verdict = await self._judge(self.task, turn)
        return turn.verdict

    def answer(self, turn: Turn) -> str | None:
        """The final answer that a turn's text gives."""
        return self.task.extract(turn.text) if turn.answers else None

    def must_be_within(self, agent: AgentId, turns: int) -> None:
        """Raise TooManyTurns where an agent speaks more often than the runner says."""
        if self.limits is not None and turns > self.limits.get(agent, 0):
            raise TooManyTurns(
                f"{self.runner}: agent {agent!r} speaks {turns} times, and its most_turns says {self.limits.get(agent, 0)}, by "
                "which batches and memory are planned; mend most_turns, or run"
            )

    def count(self, what: str) -> None:
        """Count something worth counting; it becomes the metric ``team/<what>``, a mean over episodes."""
        self.record.counts[what] += 1


class Agent:
    """A seat in one episode. Every :meth:`act` is one turn, recorded when it ends."""

    def __init__(
        self,
        name: AgentId,
        episode: LiveEpisode,
        generate: Generate,
        role: str = "",
        overflow: Overflow = Overflow.refuse,
    ) -> None:
        self.name, self.role, self._episode, self._generate = name, role, episode, generate
        self._overflow = overflow
        self._rounds: set[int] = set()

    @property
    def turns(self) -> list[Turn]:
        return self._episode.record.trajectory(self.name)

    @property
    def prompt(self) -> list[Message]:
        """What the task shows this agent, its role after the question: agents share the longer prefix."""
        return followed_by(self._episode.task.observation(self.name), self.role)

    @property
    def history(self) -> list[Message]:
        """The agent's last observation and its own answer: appending to it keeps the context append-only."""
        last = self.turns[-1]
        return [*last.observation, {"role": "assistant", "content": last.text}]

    def told(self, text: str) -> list[Message]:
        """The agent's conversation and a text that comes next; before its first turn the text stands after the question."""
        return [*self.history, user(text)] if self.turns else followed_by(self.prompt, text)

    def act(
        self, observation: list[Message], round: int | None = None, answers: bool = True
    ) -> Coroutine[Any, Any, Turn]:
        """Answer an observation.

        ``round`` is 1 + the deepest turn that has ended when this is called, unless given; ``answers=False`` marks what
        is no answer to the task. Raises ValueError if the agent has spoken in that round already: a turn grid holds one
        turn per (episode, round, agent).
        """
        return self._turn(observation, self._enter(round), 0, answers=answers)

    async def alternatives(self, observation: list[Message], count: int, round: int | None = None) -> list[Turn]:
        """Several answers to one observation, at the same time. The conversation goes on from that which :func:`keep` names."""
        round = self._enter(round)
        branches = [self._turn(observation, round, branch, kept=False, trained=False) for branch in range(count)]
        return await together(branches)

    def _enter(self, round: int | None) -> int:
        round = self._episode.record.num_rounds + 1 if round is None else round
        if round in self._rounds:
            raise ValueError(
                f"agent {self.name!r} acts twice in round {round}; give its second turn a round of its own"
            )
        self._rounds.add(round)
        self._episode.must_be_within(self.name, len(self._rounds))
        return round

    async def _turn(self, observation: list[Message], round: int, branch: int, **marks: bool) -> Turn:
        turn = await self._fitting(observation, round, branch)
        for name, value in marks.items():
            setattr(turn, name, value)
        self._episode.record.turns.append(turn)
        return turn

    async def _fitting(self, observation: list[Message], round: int, branch: int) -> Turn:
        """Generate; where the context is too long, make it shorter as the runner's ``overflow`` says."""
        previous = self.turns[-1] if self.turns else None
        head, summarised = len(self.prompt), False
        while True:
            try:
                return await self._generate(self.name, observation, round, previous, branch)
            except ContextOverflow:
                shorter = None if self._overflow is Overflow.refuse else drop_oldest(observation, head)
                if shorter is None:
                    raise
                noted = None
                if self._overflow is Overflow.summarise and not summarised:
                    noted, summarised = await self._summarised(observation, head, round, branch), True
                if noted is None:
                    self._episode.count("dropped_rounds")
                observation = noted or shorter

    async def _summarised(self, observation: list[Message], head: int, round: int, branch: int) -> list[Message] | None:
        """The conversation with its older part as a note, which the agent writes for itself and which is not trained; None
        where that part alone is too long to be read."""
        try:
            note = await self._generate(self.name, to_summarise(observation, head), round, None, -1 - branch)
        except ContextOverflow:
            return None
        note.kept = note.trained = note.answers = False
        self._episode.record.turns.append(note)
        self._episode.count("summaries")
        return with_summary(observation, head, note.text)


def keep(turn: Turn, among: Sequence[Turn], train_all: bool = False) -> Turn:
    """Let the conversation go on from one of several alternatives.

    It alone is trained, as a turn like any other; with ``train_all`` all of them are, each compared with the others of
    its agent.
    """
    for other in among:
        other.trained = other.compared = train_all
    turn.kept = turn.trained = True
    return turn


class Runner(ABC):
    """Override :meth:`run`. Facts about a runner are class attributes, so that nothing branches on its name."""

    append_only: ClassVar[bool] = True
    """Every observation of an agent begins with its last one and its answer to it, so that servers reuse what they read."""
    num_agents: ClassVar[tuple[int, int | None]] = (1, None)
    """At least and at most so many agents; None for no limit."""
    seats: ClassVar[tuple[str, ...]] = ()
    """Keys of the configuration that name an agent; null leaves it to the runner."""
    default_credit: ClassVar[str | None] = None
    """What ``credit=auto`` stands for; None leaves it to the learner."""

    @property
    def compares_alternatives(self) -> bool:
        """Whether an episode alone holds turns that are compared with one another."""
        return False

    @property
    def in_turn(self) -> bool:
        """Whether agents speak one after another, so that no two answers share a round."""
        return False

    @property
    def votes(self) -> bool:
        """Whether the team's answer is decided by :func:`marl.runners.decide`: here, where ``runner.decide`` says how."""
        return hasattr(self.config, "decide")

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        """The last round that there can be; None where it is not known before."""
        return None

    @dataclass
    class Config:
        name: str
        overflow: Overflow = Overflow.refuse
        """What is done where a conversation exceeds ``data.max_prompt_length``."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    async def run(self, episode: LiveEpisode) -> str | None:
        """Play one episode and return the team's final answer, or None where it has none."""

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        """How often each agent speaks in an episode at most."""
        return dict.fromkeys(agents, 1)

    def keywords(self, agents: Sequence[AgentId]) -> Sequence[str]:
        """Words by which agents lead a conversation on: it is played with each of them to see how long it gets."""
        return ()

    def check(self, agents: Sequence[AgentId]) -> None:
        """Raise ValueError where these agents cannot play it."""
        low, high = self.num_agents
        if len(agents) < low or (high is not None and len(agents) > high):
            wanted = f"{low}" if high == low else f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(f"runner={self.config.name} is played by {wanted} agents, and agents names {len(agents)}")
        for key in self.seats:
            self.must_be_agents(f"runner.{key}", filter(None, [getattr(self.config, key)]), agents)

    def must_be_agents(self, key: str, names: Iterable[AgentId], agents: Sequence[AgentId]) -> None:
        for name in names:
            if name not in agents:
                raise ValueError(
                    f"{key}={name}: no such agent; expected one of {', '.join(agents)}.{did_you_mean(name, agents)}"
                )


class Telling(Runner):
    """A runner whose agents are shown what others said."""

    @dataclass
    class Config(Runner.Config):
        peer_template: str = "{agent} answered:\n{text}"
        """How a turn is shown to others. Fields: agent, text, answer (the final one alone), score (the verdict on it)."""
        separator: str = "\n\n"
        """Between the parts of what is shown."""
        hide_answers: bool = False
        """Others are shown how an agent reasoned, and not its final answer."""

    config: Config

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        template = self.config.peer_template
        if self.config.hide_answers and "{answer" in template:
            raise ValueError(
                f"runner.hide_answers=true, and runner.peer_template={template!r} shows the answer; leave out {{answer}}, or hide nothing"
            )

    async def shown(self, episode: LiveEpisode, turns: Iterable[Turn], instruction: str = "") -> str:
        """What is shown of these turns, and an instruction."""
        parts = [await self._shown(episode, turn) for turn in turns]
        return self.config.separator.join(filter(None, [*parts, instruction]))

    async def _shown(self, episode: LiveEpisode, turn: Turn) -> str:
        template = self.config.peer_template
        text = episode.task.hide(turn.text) if self.config.hide_answers else turn.text
        score = (await episode.verdict(turn)).score if "{score" in template else 0.0
        return template.format(agent=turn.agent, text=text, answer=episode.answer(turn), score=score)


async def played(runner: Runner, episode: LiveEpisode) -> Episode:
    """Play to the end: the record, its turns in order, with the team's answer. Raises TooManyTurns.

    A context overflow ends the conversation: it is an outcome (``Episode.failure``), with the turns until then.
    """
    record = episode.record
    episode.runner, episode.limits = f"runner={runner.config.name}", runner.most_turns(record.agents)
    try:
        record.answer = await runner.run(episode)
    except ContextOverflow as error:
        record.failure, record.failure_message = "overflow", str(error)
        record.answer = record.ballot = record.settled = None
    for agent, turns in Counter(turn.agent for turn in record.turns if turn.trained).items():
        episode.must_be_within(agent, turns)
    record.sort()
    return record


async def together(turns: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Agents act at the same time; the first failure cancels the rest and is raised as it is.

    A context overflow cancels nobody: which turns an episode holds must not depend on who answered first.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(or_overflow(turn)) for turn in turns]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    results = [task.result() for task in tasks]
    for result in results:
        if isinstance(result, ContextOverflow):
            raise result
    return results  # type: ignore[return-value]


async def or_overflow(turn: Coroutine[Any, Any, T]) -> T | ContextOverflow:
    try:
        return await turn
    except ContextOverflow as overflow:
        return overflow


def says(text: str, word: str) -> bool:
    """Whether a text says a word, not within another one; the empty word is never said."""
    return bool(word) and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def followed_by(messages: list[Message], text: str) -> list[Message]:
    """Messages with a text after the last one's."""
    if not text:
        return messages
    *earlier, last = messages
    return [*earlier, {**last, "content": f"{last['content']}\n\n{text}"}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


RUNNERS: Registry[Runner] = Registry("runner")
register_runner = RUNNERS.register
