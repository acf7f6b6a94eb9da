"""Environments and games. Importing this package registers the built-in ones."""

from marl.envs.base import ENVIRONMENTS, Environment, make_environment, register_environment
from marl.envs.games import GAMES, Game, Joint, make_game, register_game
from marl.envs.known_games import TABLES

__all__ = [
    "ENVIRONMENTS",
    "GAMES",
    "TABLES",
    "Environment",
    "Game",
    "Joint",
    "make_environment",
    "make_game",
    "register_environment",
    "register_game",
]
