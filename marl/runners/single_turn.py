"""Single turn: every agent answers the task once, alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import Runner, register_runner
from marl.runners.episode import LiveEpisode, together
from marl.runners.team_answer import Decide, decide
from marl.types import AgentId


@register_runner("single_turn")
class SingleTurn(Runner):
    votes = True

    @dataclass
    class Config(Runner.Config):
        decide: Decide = Decide.majority

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        turns = await together(agent.act(agent.prompt) for agent in episode.agents)
        return await decide(self.config.decide, turns, episode)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 1
