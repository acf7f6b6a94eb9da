"""Multi-turn: one agent answers again and again, spoken to by itself, by a simulated user or by an environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from marl.envs.base import make_environment
from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import Agent, LiveEpisode
from marl.runners.messages import says
from marl.runners.team_answer import agreed
from marl.types import AgentId, Turn
from marl.utils.numbers import bounded, count


class Stop(Enum):
    never = "never"
    answered = "answered"
    """After the first turn that gives an answer."""
    repeated = "repeated"
    """After a turn that gives the same answer as the one before."""
    right = "right"
    """After the first turn that the score calls right."""


@register_runner("multi_turn")
class MultiTurn(ConversationRunner):
    num_agents = (1, 2)
    seats = ("user",)

    @dataclass
    class Config(ConversationRunner.Config):
        peer_template: str = "{text}"
        num_turns: int = bounded(2, count(1, 10_000))
        """Maximum number of turns of the first agent."""
        user: AgentId | None = None
        """The agent that plays the user; it reads what the other says as it is."""
        environment: Any = None
        """A registered environment that replies to every turn: its name, such as ``verifier``, or a group of its ``name``
        and its options."""
        instruction: str = "Check your answer, then answer again."
        """Message to the agent where there is neither user nor environment."""
        stop: Stop = Stop.never
        stop_words: list[str] = field(default_factory=list)
        """Either side ends the conversation by saying one of them."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    @property
    def may_end_early(self) -> bool:
        """Not with the other rules: before a first answer, or a right one, there is nothing to add up."""
        return self.config.stop is Stop.repeated or bool(self.config.stop_words)

    async def run(self, episode: LiveEpisode) -> str | None:
        agent = next(agent for agent in episode.agents if agent.name != self.config.user)
        environment = make_environment(self.config.environment) if self.config.environment else None
        turns = [await agent.act(agent.prompt)]
        while len(turns) < self.config.num_turns and not await self.over(turns, episode):
            if environment:
                said = await environment.reply(episode, turns)
            elif self.config.user:
                said = await self.user_says(episode.agent(self.config.user), turns[-1], episode)
            else:
                said = self.config.instruction
            if said is None:
                break
            turns.append(await agent.act(agent.continue_with(said)))
        return episode.answer(turns[-1])

    async def user_says(self, user: Agent, turn: Turn, episode: LiveEpisode) -> str | None:
        said = await user.act(user.continue_with(await self.shown(episode, [turn])), answers=False)
        return None if self.ends(said) else said.text

    async def over(self, turns: list[Turn], episode: LiveEpisode) -> bool:
        answers = [episode.answer(turn) for turn in turns[-2:]]
        match self.config.stop:
            case Stop.answered:
                done = answers[-1] is not None
            case Stop.repeated:
                done = len(answers) == 2 and agreed(answers) is not None
            case Stop.right:
                done = (await episode.score(turns[-1])).right
            case _:
                done = False
        return done or self.ends(turns[-1])

    def ends(self, turn: Turn) -> bool:
        return any(says(turn.text, word) for word in self.config.stop_words)

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, self.config.num_turns)

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        if not all(self.config.stop_words):
            raise ValueError(
                f"runner.stop_words={self.config.stop_words}: an empty word never ends a conversation; remove it"
            )
        environment, user = self.config.environment, self.config.user
        if environment:
            make_environment(environment)
        if len(agents) != (2 if user else 1):
            raise ValueError(
                f"runner.user={user}: runner={self.config.name} is played by one agent and, where this names one, a second; "
                f"agents names {', '.join(agents)}"
            )
        if environment and user:
            raise ValueError(
                f"runner.environment={environment} and runner.user={user} would both reply; leave one null"
            )

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return self.config.num_turns * (2 if self.config.user else 1)
