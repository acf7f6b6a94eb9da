"""A runner is the protocol by which agents talk: control flow over ``await agent.act(messages)``.

It knows no tokens, no rewards and no cluster, and it is a deterministic function of the answers it gets: whatever it
draws, it draws from ``episode.rng``.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from marl.runners.episode import FLOW, Flow, LiveEpisode
from marl.runners.messages import Overflow
from marl.types import AgentId, ContextOverflow, Episode, Turn
from marl.utils.registry import Registry, did_you_mean

T = TypeVar("T")


class Runner(ABC):
    """Override :meth:`run`. Facts about a runner are class attributes, so that nothing branches on its name."""

    append_only: ClassVar[bool] = True
    """Each observation extends the agent's previous one and its answer, so that servers reuse their prefix cache."""
    num_agents: ClassVar[tuple[int, int | None]] = (1, None)
    """At least and at most so many agents; None for no limit."""
    seats: ClassVar[tuple[str, ...]] = ()
    """Keys of the configuration that name an agent; null leaves it to the runner."""
    votes: ClassVar[bool] = False
    """True if :func:`marl.runners.decide` decides the team's answer, by the rule ``runner.decide``."""
    scores_turns: ClassVar[bool] = False
    """True if it scores turns itself, without a reward function."""

    @property
    def default_credit(self) -> str | None:
        """Credit scheme that ``credit=auto`` selects; None leaves it to the learner. A class attribute where no option
        matters."""
        return None

    @property
    def compares_alternatives(self) -> bool:
        """True if every trained turn is compared with alternatives in its own episode, by their own scores."""
        return False

    @property
    def may_end_early(self) -> bool:
        """True if agents can end the conversation, or leave it, before its last round."""
        return False

    @property
    def in_turn(self) -> bool:
        """True if agents speak one after another, so that no two answers share a round."""
        return False

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        """The last round that there can be; None where it is not known before."""
        return None

    @dataclass
    class Config:
        name: str
        overflow: Overflow = Overflow.refuse
        """Handling of a conversation that exceeds ``data.max_prompt_length``."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    async def run(self, episode: LiveEpisode) -> str | None:
        """Play one episode and return the team's final answer, or None where it has none."""

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        """Maximum number of turns of each agent per episode."""
        return dict.fromkeys(agents, 1)

    def failure_score(self, episode: Episode) -> float | None:
        """Team score of a conversation that ended early; None for ``judge.failure_score``."""
        return None

    def last_turn_score(self, episode: Episode, agent: AgentId) -> float | None:
        """Score of an agent's last turn in a conversation that ended early; None for the team's."""
        return None

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


class ConversationRunner(Runner):
    """A runner whose agents are shown other agents' turns."""

    @dataclass
    class Config(Runner.Config):
        peer_template: str = "{agent} answered:\n{text}"
        """Template of a turn as others see it. Fields: agent, text, answer (the final one alone), score."""
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
        """Text that shows these turns, followed by an instruction."""
        parts = [await self._shown(episode, turn) for turn in turns]
        return self.config.separator.join(filter(None, [*parts, instruction]))

    async def _shown(self, episode: LiveEpisode, turn: Turn) -> str:
        template = self.config.peer_template
        text = episode.task.hide(turn.text) if self.config.hide_answers else turn.text
        score = (await episode.score(turn)).value if "{score" in template else 0.0
        return template.format(agent=turn.agent, text=text, answer=episode.answer(turn), score=score)


def since_own(turns: Sequence[Turn], agent: AgentId) -> Sequence[Turn]:
    """The turns after the agent's own last one; all of them if it has none."""
    return turns[max((i + 1 for i, turn in enumerate(turns) if turn.agent == agent), default=0) :]


async def play_to_end(runner: Runner, episode: LiveEpisode) -> Episode:
    """Play to the end: the record, its turns in order, with the team's answer. Raises TooManyTurns.

    A context overflow ends the conversation: it is an outcome (``Episode.failure``), with the turns until then.
    """
    record = episode.record
    episode.runner, episode.limits = f"runner={runner.config.name}", runner.most_turns(record.agents)
    episode.last_round = runner.last_round(record.agents)
    outer = FLOW.set(Flow(record))
    try:
        record.answer = await runner.run(episode)
    except ContextOverflow as error:
        record.failure, record.failure_message = "overflow", str(error)
        record.answer = record.ballot = record.runner_score = None
    finally:
        FLOW.reset(outer)
    for agent, turns in Counter(turn.agent for turn in record.turns if turn.trained).items():
        episode.must_be_within(agent, turns)
    record.sort()
    return record


RUNNERS: Registry[Runner] = Registry("runner")
register_runner = RUNNERS.register
