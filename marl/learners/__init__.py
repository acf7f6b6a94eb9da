"""Importing this package registers the built-in learners and credit schemes."""

from marl.learners import (
    at_grpo,
    cory,
    counterfactual_credit,
    grpo,
    happo,
    ippo,
    magrpo,
    mappo,
    qmix,
    rae,
    replay_credit,
    vdn,
)
from marl.learners.base import LEARNERS, Learner, broadcast_to_tokens, register_learner
from marl.learners.credit_schemes import CREDITS, Credit, register_credit
from marl.learners.extra_rollouts import Gathered, Rollouts

__all__ = [
    "CREDITS",
    "LEARNERS",
    "Credit",
    "Gathered",
    "Learner",
    "Rollouts",
    "at_grpo",
    "broadcast_to_tokens",
    "cory",
    "counterfactual_credit",
    "grpo",
    "happo",
    "ippo",
    "magrpo",
    "mappo",
    "qmix",
    "rae",
    "register_credit",
    "register_learner",
    "replay_credit",
    "vdn",
]
