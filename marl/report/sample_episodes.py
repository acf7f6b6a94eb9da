"""Some episodes for a tracker's tables and transcripts. Pure, over episodes."""

import random
from collections.abc import Sequence
from typing import Any

from marl.report.foresight import speaker
from marl.types import Episode, Message, Turn
from marl.utils.secret_masking import masked_text

EPISODE_COLUMNS = ("step", "task", "sample", "prompt", "transcript", "answer", "truth", "score", "failure")
TURN_COLUMNS = ("step", "task", "sample", "turn", "agent", "round", "prompt", "output", "answer", "score")


class Sample(tuple[str, str, float]):
    """An episode as verl's trackers take it: input, output and score; and as rows of our tables."""

    episode: Episode

    @classmethod
    def of(cls, episode: Episode) -> "Sample":
        sample = cls((text_of(episode.task.messages), transcript(episode), episode.scored.value))
        sample.episode = episode
        return sample

    def row(self, step: int) -> list[Any]:
        """The values of ``EPISODE_COLUMNS``."""
        prompt, spoken, score = self
        episode = self.episode
        answers = [shown(episode.answer), shown(episode.task.ground_truth)]
        return [step, episode.task.id, episode.sample, prompt, spoken, *answers, score, episode.failure or ""]

    def turn_rows(self, step: int) -> list[list[Any]]:
        """The values of ``TURN_COLUMNS``, for every turn."""
        place = [step, self.episode.task.id, self.episode.sample]
        return [[*place, number, *turn_row(turn)] for number, turn in enumerate(self.episode.turns, start=1)]


def samples_of(episodes: Sequence[Episode], number: int) -> list[Sample]:
    """So many episodes by chance: of the same tasks whenever the same tasks were played, as verl draws them."""
    ordered = sorted(episodes, key=lambda episode: (episode.task.id, episode.sample))
    return [Sample.of(episode) for episode in random.Random(0).sample(ordered, min(number, len(ordered)))]


def turn_row(turn: Turn) -> list[Any]:
    given = [text_of(turn.observation), masked_text(turn.text), shown(turn.scored.answer)]
    return [speaker(turn), turn.round, *given, turn.scored.value]


def text_of(messages: Sequence[Message]) -> str:
    return masked_text("\n".join(f"{message['role']}: {message['content']}" for message in messages))


def transcript(episode: Episode) -> str:
    """The turns one below the other, in Markdown."""
    said = [
        f"**{speaker(turn)}, round {turn.round}** (score {turn.scored.value:g}):\n\n{quoted(turn.text)}"
        for turn in episode.turns
    ]
    return masked_text("\n\n".join(said)) or f"no turn: {episode.failure}"


def quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.split("\n"))


def shown(value: Any) -> str:
    """An answer as text: a tracker's column has one type."""
    return "" if value is None else masked_text(str(value))
