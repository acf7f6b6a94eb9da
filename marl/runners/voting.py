"""Voting: agents answer alone; then the answers are counted, or the agents vote on them.

Several answers of one model to one prompt are several agents of one policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import LiveEpisode, together
from marl.runners.team_answer import Decide, decide
from marl.types import AgentId


@register_runner("voting")
class Voting(ConversationRunner):
    votes = True

    @dataclass
    class Config(ConversationRunner.Config):
        ballot: bool = False
        """Agents read all answers and give one of them, in round 2; the votes are counted in place of the answers."""
        instruction: str = "Which of these answers is right? Give it as your answer."
        """Ends what is shown before a ballot."""
        decide: Decide = Decide.majority

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        turns = await together(agent.act(agent.prompt) for agent in episode.agents)
        if not self.config.ballot:
            return await decide(self.config.decide, turns, episode)
        shown = await self.shown(episode, turns, self.config.instruction)
        votes = await together(agent.act(agent.continue_with(shown)) for agent in episode.agents)
        proposed = {episode.answer(turn) for turn in turns}
        return await decide(self.config.decide, votes, episode, among=proposed)

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, 1 + self.config.ballot)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 1 + self.config.ballot
