"""Live episodes and the agents that act in them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from marl.runners.messages import (
    NONE,
    Instructions,
    Overflow,
    drop_oldest,
    followed_by,
    to_summarise,
    user,
    with_summary,
)
from marl.types import AgentId, ContextOverflow, Episode, Message, Score, Task, Turn

T = TypeVar("T")

FORESIGHT = -1000
"""Branch of a prediction about the first seat; those about later seats count down from it, away from other notes."""
Judge = Callable[[Task, Turn], Awaitable[Score]]


class Generate(Protocol):
    """Turns an observation into a turn. ``previous`` is the agent's last turn, whose ids the observation may extend;
    ``branch`` tells alternatives of one (agent, round) apart. Raises ContextOverflow for too long an observation."""

    def __call__(
        self, agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
    ) -> Awaitable[Turn]: ...


@dataclass
class Flow:
    """A flow of control in an episode: the conversation, or a branch of :func:`together`. Tasks that it starts otherwise share it."""

    record: Episode
    depth: int | None = None
    """The deepest round that a branch has waited for; None for the conversation, for which all turns count."""

    def deepest_round(self) -> int:
        return self.record.num_rounds if self.depth is None else self.depth

    def branch(self) -> "Flow":
        return Flow(self.record, self.deepest_round())

    def has_reached(self, round: int) -> None:
        """Note a round that this flow has waited for."""
        if self.depth is not None:
            self.depth = max(self.depth, round)


FLOW: ContextVar[Flow | None] = ContextVar("flow", default=None)


class TooManyTurns(ValueError):
    """Raised where an agent speaks more often than its runner's ``most_turns``, or after its ``last_round``, by which a run is
    planned."""


class LiveEpisode:
    """A runner's view of the episode that it plays: the task, the agents, a source of randomness and a scorer."""

    def __init__(
        self,
        record: Episode,
        generate: Generate,
        judge: Judge,
        roles: Mapping[AgentId, Instructions] | None = None,
        overflow: Overflow = Overflow.refuse,
    ) -> None:
        self.record, self.task, self.rng = record, record.task, random.Random(record.seed)
        told = roles or {}
        self.agents = [Agent(name, self, generate, told.get(name, NONE), overflow) for name in record.agents]
        self._judge = judge
        self.runner = ""
        self.limits: Mapping[AgentId, int] | None = None
        """Maximum number of turns of each agent; None for no limit."""
        self.last_round: int | None = None

    def agent(self, name: AgentId) -> "Agent":
        return next(agent for agent in self.agents if agent.name == name)

    async def score(self, turn: Turn) -> Score:
        """The score of a turn, asked for once."""
        if turn.score is None:
            turn.score = await self._judge(self.task, turn)
        return turn.score

    def answer(self, turn: Turn) -> str | None:
        """The final answer that a turn's text gives."""
        return self.task.extract(turn.text) if turn.answers else None

    def must_be_within(self, agent: AgentId, turns: int) -> None:
        """Raise TooManyTurns where an agent speaks more often than the runner says."""
        if self.limits is not None and turns > self.limits.get(agent, 0):
            raise TooManyTurns(
                f"{self.runner}: agent {agent!r} speaks {turns} times, and its most_turns says {self.limits.get(agent, 0)}, by "
                "which batches and memory are planned; fix most_turns() or run()"
            )

    def must_be_foreseen(self, agent: AgentId, round: int) -> None:
        """Raise TooManyTurns for a round after the one that the runner calls its last."""
        if self.last_round is not None and round > self.last_round:
            raise TooManyTurns(
                f"{self.runner}: agent {agent!r} speaks in round {round}, and its last_round says {self.last_round}, by which "
                "settings of rounds are checked; fix last_round() or run()"
            )

    @property
    def flow(self) -> Flow:
        """The flow of control that asks. In a branch of :func:`together`, rounds of the other branches do not count: the rounds of
        an episode, and its seeds, must not depend on who answers first."""
        flow = FLOW.get()
        return flow if flow is not None and flow.record is self.record else Flow(self.record)

    def count(self, what: str) -> None:
        """Count an event, logged as ``team/<what>``, a mean over episodes."""
        self.record.counts[what] += 1


class Agent:
    """A seat in one episode. Every :meth:`act` is one turn, recorded when it ends."""

    def __init__(
        self,
        name: AgentId,
        episode: LiveEpisode,
        generate: Generate,
        told: Instructions = NONE,
        overflow: Overflow = Overflow.refuse,
    ) -> None:
        self.name, self.told, self._episode, self._generate = name, told, episode, generate
        self._overflow = overflow
        self._rounds: set[int] = set()

    @property
    def turns(self) -> list[Turn]:
        return self._episode.record.trajectory(self.name)

    @property
    def prompt(self) -> list[Message]:
        """The task as this agent sees it, with its system prompt, and its role after the question: agents share the longer prefix."""
        return self.told.beside(self._episode.task.observation(self.name))

    @property
    def history(self) -> list[Message]:
        """The agent's last observation and its own answer: appending to it keeps the context append-only."""
        last = self.turns[-1]
        return [*last.observation, {"role": "assistant", "content": last.text}]

    def continue_with(self, text: str) -> list[Message]:
        """The agent's conversation and a text that comes next; before its first turn the text stands after the question."""
        return [*self.history, user(text)] if self.turns else followed_by(self.prompt, text)

    def act(
        self,
        observation: list[Message],
        round: int | None = None,
        answers: bool | Callable[[Turn], bool] = True,
    ) -> Coroutine[Any, Any, Turn]:
        """Answer an observation.

        ``round`` is 1 + the deepest turn that has ended when this is called, unless given; inside :func:`together`, the
        deepest one that this branch has waited for. ``answers`` is, or says of a turn, False where that is not an answer to
        the task. Raises ValueError if the agent has spoken in that round already: a turn grid holds one turn per (episode,
        round, agent).
        """
        return self._turn(observation, self._enter(round), 0, answers)

    async def alternatives(self, observation: list[Message], count: int, round: int | None = None) -> list[Turn]:
        """Several answers to one observation, at the same time. The conversation goes on from that which :func:`keep` names."""
        round = self._enter(round)
        branches = [self._turn(observation, round, branch, kept=False) for branch in range(count)]
        return await together(branches)

    async def foresee(self, peer: AgentId, observation: list[Message], round: int) -> Turn | None:
        """A prediction of a peer's next turn: a note that is not trained, and from which the conversation does not go on. None
        where the question for it is too long to be read."""
        seat = self._episode.record.agents.index(peer)
        previous = self.turns[-1] if self.turns else None
        try:
            note = await self._generate(self.name, observation, round, previous, FORESIGHT - seat)
        except ContextOverflow:
            self._episode.count("unread_requests")
            return None
        note.foresees = peer
        return self._noted(note)

    def _enter(self, round: int | None) -> int:
        round = self._episode.flow.deepest_round() + 1 if round is None else round
        if round in self._rounds:
            raise ValueError(
                f"agent {self.name!r} acts twice in round {round}; give its second turn a round of its own"
            )
        self._rounds.add(round)
        self._episode.must_be_foreseen(self.name, round)
        self._episode.must_be_within(self.name, len(self._rounds))
        return round

    async def _turn(
        self,
        observation: list[Message],
        round: int,
        branch: int,
        answers: bool | Callable[[Turn], bool] = True,
        kept: bool = True,
    ) -> Turn:
        """A turn, recorded; where the context is too long, the runner's ``overflow`` makes it shorter."""
        previous = self.turns[-1] if self.turns else None
        head, summarised, turn = len(self.prompt), False, None
        while turn is None:
            try:
                turn = await self._generate(self.name, observation, round, previous, branch)
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
        turn.answers = answers(turn) if callable(answers) else answers
        turn.kept, turn.trained = kept, turn.trained and kept
        self._episode.record.turns.append(turn)
        self._episode.flow.has_reached(round)
        return turn

    async def _summarised(self, observation: list[Message], head: int, round: int, branch: int) -> list[Message] | None:
        """The conversation with its older part as a note, which the agent writes for itself and which is not trained; None
        where that part alone is too long to be read, or the note is empty."""
        try:
            note = await self._generate(self.name, to_summarise(observation, head), round, None, -1 - branch)
        except ContextOverflow:
            return None
        self._noted(note)
        if not note.text.strip():  # its thought was never closed, or it ended at once
            return None
        self._episode.count("summaries")
        return with_summary(observation, head, note.text)

    def _noted(self, note: Turn) -> Turn:
        """Record what the agent wrote for itself."""
        note.kept = note.trained = note.answers = False
        self._episode.record.turns.append(note)
        return note


def keep(turn: Turn, among: Sequence[Turn], train_all: bool = False) -> Turn:
    """Let the conversation go on from one of several alternatives.

    It alone is trained, as a turn like any other; with ``train_all`` all of them are, each compared with the others of
    its agent.
    """
    for other in among:
        other.trained = other.compared = train_all
    turn.kept = turn.trained = True
    return turn


async def together(turns: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Agents act at the same time; the first failure cancels the rest and is raised as it is.

    A context overflow cancels nobody: which turns an episode holds must not depend on who answered first.
    """
    own = FLOW.get()
    flows = [(turn, own and own.branch()) for turn in entered(turns)]
    tasks = [asyncio.create_task(turn, context=context_of(flow)) for turn, flow in flows]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for task in tasks if task in done and (error := task.exception()) is not None]
            for error in failures:
                if not isinstance(error, ContextOverflow):
                    raise error
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    for _, ended in flows:
        if own and ended:
            own.has_reached(ended.deepest_round())
    return [task.result() for task in tasks]


def context_of(flow: Flow | None) -> Context:
    """The context of a flow of control that runs at the same time as others."""
    context = copy_context()
    context.run(FLOW.set, flow)
    return context


def entered(turns: Iterable[Coroutine[Any, Any, T]]) -> list[Coroutine[Any, Any, T]]:
    """All of them; where one is refused, those before it are closed: nobody will await them."""
    made: list[Coroutine[Any, Any, T]] = []
    try:
        for turn in turns:
            made.append(turn)
    except BaseException:
        for turn in made:
            turn.close()
        raise
    return made
