"""Sample episodes of a validation in a run's trackers (``trainer.log_val_generations``), in verl's own tables."""

import random
from collections.abc import Sequence
from typing import Any

from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from marl.types import Episode, Message
from marl.utils.secret_masking import masked_text

Sample = tuple[str, str, float]
"""Input, output and score: the prompt, the transcript and the score of the team's answer."""


class Transcripts(ValidationGenerationsLogger):
    def __init__(self, settings: Any) -> None:
        """``settings``: ``trainer``."""
        super().__init__(settings.project_name, settings.experiment_name)
        self.number = settings.log_val_generations

    def show(self, tracking: Tracking, episodes: Sequence[Episode], step: int) -> None:
        """Show some of these episodes; none with ``trainer.log_val_generations=0``."""
        if self.number == 0:
            return
        if (tensorboard := tracking.logger.get("tensorboard")) is not None:
            self.writer = tensorboard.writer  # verl's would write into another folder
        self.log(tracking.logger, samples_of(episodes, self.number), step)


def samples_of(episodes: Sequence[Episode], number: int) -> list[Sample]:
    """Episodes drawn by chance: of the same tasks whenever the same tasks were played, as verl draws them."""
    ordered = sorted(episodes, key=lambda episode: (episode.task.id, episode.sample))
    drawn = random.Random(0).sample(ordered, min(number, len(ordered)))
    return [(text_of(episode.task.messages), transcript(episode), episode.scored.value) for episode in drawn]


def text_of(messages: Sequence[Message]) -> str:
    return masked_text("\n".join(f"{message['role']}: {message['content']}" for message in messages))


def transcript(episode: Episode) -> str:
    """The turns one below the other, in Markdown, and the team's answer."""
    turns = [
        f"**{turn.agent}, round {turn.round}** (score {turn.scored.value:g}):\n\n{quoted(turn.text)}"
        for turn in episode.turns
    ] or [f"no turn: {episode.failure}"]
    answer = "-" if episode.answer is None else episode.answer
    return masked_text("\n\n".join([*turns, f"Answer: {answer}; truth: {episode.task.ground_truth}"]))


def quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.split("\n"))
