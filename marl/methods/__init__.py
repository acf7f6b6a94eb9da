"""Importing this package registers the built-in methods."""

from marl.methods import dpo, hybrid, sft, spin
from marl.methods.base import METHODS, Method, register_method

__all__ = ["METHODS", "Method", "dpo", "hybrid", "register_method", "sft", "spin"]
