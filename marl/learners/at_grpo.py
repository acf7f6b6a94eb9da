"""AT-GRPO: turns compared per agent and round, rewarded by their own scores and the team's (arXiv:2510.11062)."""

from dataclasses import dataclass, field

from marl.learners.base import register_learner
from marl.learners.groups import GroupKey
from marl.learners.grpo import GRPO


@register_learner("at_grpo")
class ATGRPO(GRPO):
    """``runner=tree`` gives it the paper's sampling: several answers at every turn, compared with one another."""

    default_credit = "mixed"

    @dataclass
    class Config(GRPO.Config):
        group_by: list[GroupKey] = field(default_factory=lambda: [GroupKey.task, GroupKey.agent, GroupKey.round])

    config: Config
