"""Debate: agents answer, read one another and answer again (Du et al., arXiv:2305.14325)."""

from dataclasses import dataclass

from marl.runners.base import Agent, LiveEpisode, Runner, majority, register_runner, together, user
from marl.types import Message, Turn


@register_runner("debate")
class Debate(Runner):
    debates = True

    @dataclass
    class Config(Runner.Config):
        num_rounds: int = 2
        """All rounds, the first answers included."""
        peer_template: str = "{agent} answered:\n{text}"
        """How one peer's answer is shown. Fields: agent, text."""
        separator: str = "\n\n"
        """Between the parts of a peers' block."""
        instruction: str = "Consider the other answers, then give your updated answer."
        """Ends every peers' block; empty for none."""

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        agents = episode.agents
        turns = await together(agent.act(agent.prompt) for agent in agents)
        for _ in range(self.config.num_rounds - 1):
            turns = await together(agent.act([*agent.history, self.peers(agent, turns)]) for agent in agents)
        return majority([episode.answer(turn) for turn in turns], episode.rng)

    def peers(self, agent: Agent, turns: list[Turn]) -> Message:
        """The other agents' last answers, in the fixed order of the team."""
        shown = [
            self.config.peer_template.format(agent=turn.agent, text=turn.text)
            for turn in turns
            if turn.agent != agent.name
        ]
        return user(self.config.separator.join([*shown, *filter(None, [self.config.instruction])]))
