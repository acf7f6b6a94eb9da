"""Voting: agents answer alone, as often as they are asked to; then the answers are counted, or the agents vote on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import LiveEpisode, Telling, register_runner, together
from marl.runners.decisions import Decide, decide
from marl.types import AgentId, Turn


@register_runner("voting")
class Voting(Telling):
    append_only = False  # several answers to one prompt

    @dataclass
    class Config(Telling.Config):
        num_answers: int = 1
        """How many answers every agent gives before they are counted, each in a round of its own."""
        ballot: bool = False
        """Agents read all answers and give one of them; the votes are counted in place of the answers."""
        instruction: str = "Which of these answers is right? Give it as your answer."
        """Ends what is shown before a ballot."""
        decide: Decide = Decide.majority

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        rounds = range(1, self.config.num_answers + 1)
        turns = await together(agent.act(agent.prompt, round) for agent in episode.agents for round in rounds)
        if self.config.ballot:
            turns = await self.votes(episode, turns)
        return await decide(self.config.decide, turns, episode)

    async def votes(self, episode: LiveEpisode, candidates: list[Turn]) -> list[Turn]:
        """Who votes for what nobody proposed has not voted."""
        shown = await self.shown(episode, candidates, self.config.instruction)
        votes = await together(agent.act(agent.told(shown)) for agent in episode.agents)
        proposed = {episode.answer(turn) for turn in candidates}
        return [turn for turn in votes if episode.answer(turn) in proposed]

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, self.config.num_answers + self.config.ballot)
