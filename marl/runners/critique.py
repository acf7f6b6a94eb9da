"""Critique: a solver answers, a critic says what is wrong, a reviser answers again (Self-Refine, arXiv:2303.17651)."""

from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import LiveEpisode
from marl.types import AgentId
from marl.utils.numbers import bounded, count


@register_runner("critique")
class Critique(ConversationRunner):
    """The agents in their order: solver, critic, reviser; of two agents the solver revises its own answer."""

    num_agents = (2, 3)

    @dataclass
    class Config(ConversationRunner.Config):
        num_revisions: int = bounded(1, count(1, 10_000))
        """Number of critique and revision cycles."""
        critic_instruction: str = "Say what is wrong with this answer, and what is right. Do not answer yourself."
        """Ends what the critic is shown."""
        reviser_instruction: str = "Answer again, with this criticism in mind."
        """Ends what the answerer is shown of the criticism."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    async def run(self, episode: LiveEpisode) -> str | None:
        solver, critic, reviser = (*episode.agents, episode.agents[0])[:3]
        solution = await solver.act(solver.prompt)
        for _ in range(self.config.num_revisions):
            shown = await self.shown(episode, [solution], self.config.critic_instruction)
            critique = await critic.act(critic.continue_with(shown), answers=False)
            new = [critique] if solution.agent == reviser.name else [solution, critique]
            solution = await reviser.act(
                reviser.continue_with(await self.shown(episode, new, self.config.reviser_instruction))
            )
        return episode.answer(solution)

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        turns = dict.fromkeys(agents, self.config.num_revisions)
        turns[agents[0]] = 1 if len(agents) == 3 else 1 + self.config.num_revisions
        return turns

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 1 + 2 * self.config.num_revisions
