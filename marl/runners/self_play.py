"""Self-play: two sides answer each other in turn, with zero-sum rewards (SPIRAL, arXiv:2506.24119)."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import LiveEpisode
from marl.runners.team_answer import Decide, decide
from marl.types import AgentId, Turn
from marl.utils.numbers import bounded, count


@register_runner("self_play")
class SelfPlay(ConversationRunner):
    """Two agents of one policy (``agents.<second>.policy=<first>``), or of two."""

    num_agents = (2, 2)
    votes = True
    default_credit = "zero_sum"

    @dataclass
    class Config(ConversationRunner.Config):
        num_rounds: int = bounded(1, count(1, 10_000))
        """Number of turns of each side."""
        swap: bool = True
        """Draw the side that begins for every episode; else the first agent begins."""
        instruction: str = ""
        """Ends what a side is shown of the other."""
        decide: Decide = Decide.majority
        """Rule that decides the team's answer from the two last answers."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    async def run(self, episode: LiveEpisode) -> str | None:
        sides = list(episode.agents)
        if self.config.swap:
            episode.rng.shuffle(sides)
        said: list[Turn] = []
        for side in sides * self.config.num_rounds:
            shown = await self.shown(episode, said[-1:], self.config.instruction) if said else ""
            said.append(await side.act(side.continue_with(shown)))
        return await decide(self.config.decide, said[-2:], episode)

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, self.config.num_rounds)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 2 * self.config.num_rounds
