"""Importing this package registers the built-in learners and credit schemes."""

from marl.learners import at_grpo, cory, grpo, happo, ippo, magrpo, mappo, otherwise, qmix, rae, vdn
from marl.learners.base import LEARNERS, Learner, register_learner, spread
from marl.learners.schemes import CREDITS, Credit, register_credit

__all__ = [
    "CREDITS",
    "LEARNERS",
    "Credit",
    "Learner",
    "at_grpo",
    "cory",
    "grpo",
    "happo",
    "ippo",
    "magrpo",
    "mappo",
    "otherwise",
    "qmix",
    "rae",
    "register_credit",
    "register_learner",
    "spread",
    "vdn",
]
