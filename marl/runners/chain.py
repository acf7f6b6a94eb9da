"""Chain: each agent works on the previous agent's output; the last answer is the team's."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner, since_own
from marl.runners.episode import LiveEpisode
from marl.types import AgentId, Turn
from marl.utils.numbers import bounded, count


@register_runner("chain")
class Chain(ConversationRunner):
    @dataclass
    class Config(ConversationRunner.Config):
        laps: int = bounded(1, count(1, 10_000))
        """Number of passes through the list of agents."""
        hands_over_all: bool = False
        """Each agent reads all turns since its own last one, not only the previous one."""
        all_answer: bool = False
        """Every turn is an answer to the task; else the last one is, and a hand-over gets the team's score."""
        instruction: str = "Go on from here."
        """Appended to what is handed over."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    async def run(self, episode: LiveEpisode) -> str | None:
        said: list[Turn] = []
        seats = [*episode.agents] * self.config.laps
        for place, agent in enumerate(seats, start=1):
            handed = since_own(said, agent.name) if self.config.hands_over_all else said[-1:]
            shown = await self.shown(episode, handed, self.config.instruction) if said else ""
            answers = self.config.all_answer or place == len(seats)
            said.append(await agent.act(agent.continue_with(shown), answers=answers))
        return episode.answer(said[-1])

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, self.config.laps)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return len(agents) * self.config.laps
