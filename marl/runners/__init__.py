"""Importing this package registers the built-in runners."""

from marl.runners import debate, single_turn
from marl.runners.base import RUNNERS, Agent, LiveEpisode, Runner, majority, register_runner, together, user

__all__ = [
    "RUNNERS",
    "Agent",
    "LiveEpisode",
    "Runner",
    "debate",
    "majority",
    "register_runner",
    "single_turn",
    "together",
    "user",
]
