"""Importing this package registers the built-in methods."""

from marl.methods import dpo, hybrid, madpo, rft, sft, spin, world_model
from marl.methods.base import METHODS, Method, register_method

__all__ = ["METHODS", "Method", "dpo", "hybrid", "madpo", "register_method", "rft", "sft", "spin", "world_model"]
