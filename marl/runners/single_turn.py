"""Single turn: every agent answers the task once, alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from marl.runners.base import Runner, register_runner
from marl.runners.episode import LiveEpisode, together
from marl.runners.team_answer import Decide, decide
from marl.types import AgentId, Message


@register_runner("single_turn")
class SingleTurn(Runner):
    votes = True

    @dataclass
    class Config(Runner.Config):
        decide: Decide = Decide.majority
        instructions: list[str] = field(default_factory=list)
        """Instruction variants: every sample deals them out anew among the agents, no two the same one while there are enough.
        Empty for none."""
        instruction_template: str = "<instruction>{instruction}</instruction><question>{question}</question>"
        """A prompt with one of ``instructions``, in place of the question."""

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        prompts = self.instructed(episode, [agent.prompt for agent in episode.agents])
        turns = await together(agent.act(prompt) for agent, prompt in zip(episode.agents, prompts, strict=True))
        return await decide(self.config.decide, turns, episode)

    def instructed(self, episode: LiveEpisode, prompts: list[list[Message]]) -> list[list[Message]]:
        """The prompts, each with an instruction that the episode's seed deals out."""
        dealt = list(self.config.instructions)
        if not dealt:
            return prompts
        episode.rng.shuffle(dealt)
        template = self.config.instruction_template
        return [
            [
                *earlier,
                {**last, "content": template.format(instruction=dealt[i % len(dealt)], question=last["content"])},
            ]
            for i, (*earlier, last) in enumerate(prompts)
        ]

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 1
