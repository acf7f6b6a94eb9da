"""Importing this package registers the built-in runners."""

from marl.runners import (
    chain,
    critique,
    debate,
    graph,
    multi_turn,
    pioneer_observer,
    router,
    self_play,
    single_turn,
    summary,
    tree,
    voting,
)
from marl.runners.base import (
    RUNNERS,
    Agent,
    Generate,
    LiveEpisode,
    Runner,
    Telling,
    followed_by,
    keep,
    register_runner,
    together,
    user,
)
from marl.runners.context import ContextOverflow, Overflow
from marl.runners.decisions import Decide, decide, majority
from marl.runners.environments import ENVIRONMENTS, Environment, register_environment
from marl.runners.replay import Replay, ReplayDiverged

__all__ = [
    "ENVIRONMENTS",
    "RUNNERS",
    "Agent",
    "ContextOverflow",
    "Decide",
    "Environment",
    "Generate",
    "LiveEpisode",
    "Overflow",
    "Replay",
    "ReplayDiverged",
    "Runner",
    "Telling",
    "chain",
    "critique",
    "debate",
    "decide",
    "followed_by",
    "graph",
    "keep",
    "majority",
    "multi_turn",
    "pioneer_observer",
    "register_environment",
    "register_runner",
    "router",
    "self_play",
    "single_turn",
    "summary",
    "together",
    "tree",
    "user",
    "voting",
]
