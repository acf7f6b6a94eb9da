"""Importing this package registers the built-in learners and credit schemes."""

from marl.learners import grpo, happo, ippo, mappo
from marl.learners.base import LEARNERS, Learner, register_learner, spread
from marl.learners.schemes import CREDITS, Credit, register_credit

__all__ = [
    "CREDITS",
    "LEARNERS",
    "Credit",
    "Learner",
    "grpo",
    "happo",
    "ippo",
    "mappo",
    "register_credit",
    "register_learner",
    "spread",
]
