"""Scores on turns."""

from marl.rewards.answers import final_answer, only_answer
from marl.rewards.builtin import Builtin, builtin_compute_score
from marl.rewards.processes import RewardError, RewardUnavailable
from marl.rewards.reward import Reward, build_reward
from marl.rewards.rules import AnswerRules, answer_rules, check_extractors, extractor, hider, rule_of

__all__ = [
    "AnswerRules",
    "Builtin",
    "Reward",
    "RewardError",
    "RewardUnavailable",
    "answer_rules",
    "build_reward",
    "builtin_compute_score",
    "check_extractors",
    "extractor",
    "final_answer",
    "hider",
    "only_answer",
    "rule_of",
]
