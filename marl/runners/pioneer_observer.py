"""Pioneer and observer: one answers alone, the other answers having read it (CORY, arXiv:2410.06101)."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import LiveEpisode
from marl.runners.team_answer import Decide, decide
from marl.types import AgentId


@register_runner("pioneer_observer")
class PioneerObserver(ConversationRunner):
    num_agents = (2, 2)
    seats = ("pioneer",)
    votes = True

    @dataclass
    class Config(ConversationRunner.Config):
        pioneer: AgentId | None = None
        """null: the first agent."""
        instruction: str = ""
        """Ends what the observer is shown."""
        decide: Decide = Decide.last

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    async def run(self, episode: LiveEpisode) -> str | None:
        pioneer = episode.agent(self.config.pioneer or episode.agents[0].name)
        (observer,) = [agent for agent in episode.agents if agent is not pioneer]
        first = await pioneer.act(pioneer.prompt)
        shown = await self.shown(episode, [first], self.config.instruction)
        second = await observer.act(observer.continue_with(shown))
        return await decide(self.config.decide, [first, second], episode)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 2
