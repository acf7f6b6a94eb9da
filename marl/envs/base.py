"""What replies to an agent where nobody plays the user: a registered environment, one object an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marl.types import Turn
from marl.utils.registry import Registry

if TYPE_CHECKING:
    from marl.runners.episode import LiveEpisode


class Environment(ABC):
    """Override :meth:`reply`; what it draws, it draws from ``episode.rng``."""

    @dataclass
    class Config:
        name: str

    @abstractmethod
    async def reply(self, episode: LiveEpisode, turns: Sequence[Turn]) -> str | None:
        """What the agent is told after its last turn; None ends the episode."""


ENVIRONMENTS: Registry[Environment] = Registry("environment")
register_environment = ENVIRONMENTS.register


@register_environment("verifier")
class Verifier(Environment):
    """Tells the agent that its answer is wrong, until it is right."""

    async def reply(self, episode: LiveEpisode, turns: Sequence[Turn]) -> str | None:
        score = await episode.score(turns[-1])
        return None if score.value >= 1.0 else "That is not right. Try again."
