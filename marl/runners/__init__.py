"""Importing this package registers the built-in runners."""

from marl.envs.base import ENVIRONMENTS, Environment, register_environment
from marl.runners import (
    chain,
    critique,
    debate,
    game,
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
from marl.runners.base import RUNNERS, ConversationRunner, Runner, play_to_end, register_runner
from marl.runners.episode import Agent, Generate, LiveEpisode, TooManyTurns, keep, together
from marl.runners.messages import Instructions, Overflow, followed_by, instructions_of, says, user
from marl.runners.recorded import RecordedAnswers, ReplayDiverged
from marl.runners.team_answer import Decide, decide, majority

__all__ = [
    "ENVIRONMENTS",
    "RUNNERS",
    "Agent",
    "ConversationRunner",
    "Decide",
    "Environment",
    "Generate",
    "Instructions",
    "LiveEpisode",
    "Overflow",
    "RecordedAnswers",
    "ReplayDiverged",
    "Runner",
    "TooManyTurns",
    "chain",
    "critique",
    "debate",
    "decide",
    "followed_by",
    "game",
    "graph",
    "instructions_of",
    "keep",
    "majority",
    "multi_turn",
    "pioneer_observer",
    "play_to_end",
    "register_environment",
    "register_runner",
    "router",
    "says",
    "self_play",
    "single_turn",
    "summary",
    "together",
    "tree",
    "user",
    "voting",
]
