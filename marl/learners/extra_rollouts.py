"""The plays that a credit scheme may ask for beside a step's episodes: other answers in the place of recorded turns."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from marl.types import Episode, Metrics, Turn


@dataclass(slots=True)
class Tried:
    """An answer in a turn's place, and the episodes that followed from it."""

    episode: Episode
    at: Turn
    turn: Turn
    ends: list[Episode]

    def fresh(self) -> list[Episode]:
        """The ends that were played for it: all but the recorded one."""
        return [end for end in self.ends if end is not self.episode]


@dataclass(slots=True)
class Tries:
    """Alternative answers with scored continuations, and the cost of all attempts."""

    tried: list[Tried]
    failed: int
    turns: int
    tokens: int


class Rollouts(Protocol):
    """Continues a step's episodes with the same weights; implemented by the controller."""

    def trained(self, turn: Turn) -> bool:
        """True if the run trains such a turn."""

    def rng(self, episode: Episode) -> random.Random:
        """Random numbers of this episode in this step."""

    async def try_answers(self, places: Sequence[tuple[Episode, Turn]], alternatives: int, finishes: int) -> Tries:
        """Put further answers in each turn's place, the recorded one included, and play each to the end ``finishes`` times.

        What fails is logged and left out; raises EpisodesFailed for too much of it."""


@dataclass
class Gathered:
    """Metrics of the plays that a credit scheme asked for, and the tokens that they cost."""

    metrics: Metrics = field(default_factory=dict)
    sampled_tokens: int = 0
