"""Runners whose agents read one another's answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marl.runners.base import Runner
from marl.runners.episode import LiveEpisode
from marl.types import AgentId, Turn


class ConversationRunner(Runner):
    """A runner whose agents are shown other agents' turns."""

    @dataclass
    class Config(Runner.Config):
        peer_template: str = "{agent} answered:\n{text}"
        """Template of a turn as others see it. Fields: agent, text, answer (the final one alone), score."""
        separator: str = "\n\n"
        """Between the parts of what is shown."""
        hide_answers: bool = False
        """Others are shown how an agent reasoned, and not its final answer."""

    config: Config

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        template = self.config.peer_template
        if self.config.hide_answers and "{answer" in template:
            raise ValueError(
                f"runner.hide_answers=true, and runner.peer_template={template!r} shows the answer; leave out {{answer}}, or hide nothing"
            )

    async def shown(self, episode: LiveEpisode, turns: Iterable[Turn], instruction: str = "") -> str:
        """Text that shows these turns, followed by an instruction."""
        parts = [await self._shown(episode, turn) for turn in turns]
        return self.config.separator.join(filter(None, [*parts, instruction]))

    async def _shown(self, episode: LiveEpisode, turn: Turn) -> str:
        template = self.config.peer_template
        text = episode.task.hide(turn.text) if self.config.hide_answers else turn.text
        score = (await episode.score(turn)).value if "{score" in template else 0.0
        return template.format(agent=turn.agent, text=text, answer=episode.answer(turn), score=score)


def since_own(turns: Sequence[Turn], agent: AgentId) -> Sequence[Turn]:
    """The turns after the agent's own last one; all of them if it has none."""
    return turns[max((i + 1 for i, turn in enumerate(turns) if turn.agent == agent), default=0) :]
