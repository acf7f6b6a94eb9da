"""What agents act in. Importing this package registers the built-in games."""

from marl.envs.games import GAMES, TABLES, Game, Joint, make_game, register_game

__all__ = ["GAMES", "TABLES", "Game", "Joint", "make_game", "register_game"]
