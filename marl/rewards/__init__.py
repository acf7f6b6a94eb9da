"""Verdicts on turns."""

from marl.rewards.answers import extractor, final_answer, only_answer
from marl.rewards.base import Reward, RewardFailed, RewardHung, builtin_compute_score

__all__ = ["Reward", "RewardFailed", "RewardHung", "builtin_compute_score", "extractor", "final_answer", "only_answer"]
