"""Environments: registered classes that reply to an agent in place of a user agent, one object per episode."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marl.types import Turn
from marl.utils.registry import Registry, typed

if TYPE_CHECKING:
    from marl.runners.episode import LiveEpisode

KEY = "runner.environment"


class Environment(ABC):
    """Override :meth:`reply`; what it draws, it draws from ``episode.rng``. Its options are the fields of its ``Config``."""

    @dataclass
    class Config:
        name: str

    def __init__(self, config: Config) -> None:
        """Override it to check the options: a ValueError ends the run before it starts."""
        self.config = config

    @abstractmethod
    async def reply(self, episode: LiveEpisode, turns: Sequence[Turn]) -> str | None:
        """Reply to the agent's last turn; None ends the episode."""


ENVIRONMENTS: Registry[Environment] = Registry("environment")
register_environment = ENVIRONMENTS.register


def make_environment(given: str | Mapping[str, Any]) -> Environment:
    """The environment that a name, or a group ``{name: …, option: …}``, describes. Raises ValueError for unknown names and
    options, and for values of another type."""
    if not isinstance(given, str | Mapping):
        raise ValueError(f"{KEY}={given}: expected a name, or a group {{name: …, option: …}}")
    options = {"name": given} if isinstance(given, str) else given
    cls = ENVIRONMENTS.described(KEY, options)
    return cls(config_of(json.dumps(options, sort_keys=True), cls))


@functools.lru_cache(maxsize=64)  # every episode asks for it
def config_of(options: str, cls: type[Environment]) -> Any:
    return typed(KEY, cls.Config, json.loads(options))


@register_environment("verifier")
class Verifier(Environment):
    """Tells the agent that its answer is wrong, until it is right."""

    @dataclass
    class Config(Environment.Config):
        wrong: str = "That is not right. Try again."
        """The reply to a wrong answer."""

    config: Config

    async def reply(self, episode: LiveEpisode, turns: Sequence[Turn]) -> str | None:
        score = await episode.score(turns[-1])
        return None if score.right else self.config.wrong
