"""Summary: workers answer alone, a summariser reads them all and gives the team's answer. All are trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import LiveEpisode, together
from marl.types import AgentId


@register_runner("summary")
class Summary(ConversationRunner):
    num_agents = (2, None)
    seats = ("summariser",)

    @dataclass
    class Config(ConversationRunner.Config):
        summariser: AgentId | None = None
        """null: the last agent."""
        instruction: str = "Merge these answers into one, and give the final answer."
        """Ends what the summariser is shown."""

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        summariser = episode.agent(self.config.summariser or episode.agents[-1].name)
        workers = [agent for agent in episode.agents if agent is not summariser]
        turns = await together(agent.act(agent.prompt) for agent in workers)
        merged = await summariser.act(
            summariser.continue_with(await self.shown(episode, turns, self.config.instruction))
        )
        return episode.answer(merged)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 2
