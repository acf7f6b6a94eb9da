"""CORY: a pioneer answers, an observer reads it and answers, both get both scores, and they regularly exchange their
policies (arXiv:2410.06101)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl.learners.base import register_learner
from marl.learners.ippo import IPPO
from marl.types import AgentId, PolicyName
from marl.utils.numbers import bounded, count


@register_learner("cory")
class CORY(IPPO):
    """Made for ``runner=pioneer_observer``. Each policy learns both roles; its weights, moments, critic and KL
    coefficient are its own, and move with it when it changes hands."""

    default_credit = "joint"
    credits = ("joint",)

    @dataclass
    class Config(IPPO.Config):
        exchange_every: int = bounded(5, count(0))
        """Steps between two exchanges; 0 for none."""

    config: Config

    @property
    def exchange_every(self) -> int:
        return self.config.exchange_every

    def check(self, policies: Mapping[AgentId, Sequence[PolicyName]]) -> None:
        named = [name for own in policies.values() for name in own]
        if len(policies) < 2 or len(named) != len(policies) or len(set(named)) < len(named):
            held = ", ".join(f"{agent}: {'/'.join(own)}" for agent, own in policies.items())
            raise ValueError(
                f"learner={self.config.name} lets agents exchange their policies, and needs at least two agents with a "
                f"policy of its own each; agents have {held}. Leave agents.<name>.policy and policy_by_round out"
            )
