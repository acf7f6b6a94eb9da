"""Multi-agent DPO, as CoMLRL's MADPO has it (github.com/OpenMLRL/CoMLRL): what all agents said in one episode is preferred to what
all said in another, by the score of the team's answer.

The log-ratios of all agents are summed inside the sigmoid, -log sigmoid(beta sum_a h_a), and each policy descends it by its own
log-probs. CoMLRL's has no reference (``reference=false``), one turn an agent, and up to 16 pairs a task (``pairs_per_task``). For one
agent with one turn this is DPO.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from marl.methods.base import Policies, Rows, each, register_method
from marl.methods.choice import CompareBy, joint_contrasts
from marl.methods.dpo import DPO
from marl.methods.examples import Example, Selection, Speakers, distinct
from marl.methods.losses import joint_gradients, joint_margins, preference_slope, share_margins
from marl.types import Episode, Metrics, PolicyName
from marl.utils.numbers import bounded, count

if TYPE_CHECKING:
    from tensordict import TensorDict


@register_method("madpo")
class MADPO(DPO):
    joins_agents = True

    @dataclass
    class Config(DPO.Config):
        compare_by: CompareBy = CompareBy.team
        pairs_per_task: int | None = bounded(None, count(null=True))
        """Pairs of each task's episodes, those of the widest difference, at most; null: each episode in one pair at most."""

    config: Config

    def of_row(self, row: Mapping[str, Any], speakers: Speakers) -> list[Example]:
        """One pair: what the row has all agents say; what they share counts once."""
        found = distinct(self.pairs_of_row(row, speakers))
        sides = zip(*(example.sides for example in found), strict=True)
        return [Example(tuple([turn for own in side for turn in own] for side in sides))] if found else []

    def of_episodes(self, episodes: Sequence[Episode], speakers: Speakers) -> Selection:
        options = self.config.same_prompt, self.config.pairs_per_task
        pairs, without = joint_contrasts(episodes, speakers, *options)
        return Selection(pairs, {"method/pairs": float(len(pairs)), "method/tasks_without_contrast": float(without)})

    async def update(self, rows: Rows, policies: Policies) -> dict[PolicyName, Metrics]:
        await each(self.read_reference, rows, policies)
        results: dict[PolicyName, Metrics] = {}
        for epoch in range(1, self.config.epochs + 1):
            await self.read_margins(rows, policies)
            last = epoch == self.config.epochs
            results = await each(lambda own, group, last=last: self.descend(own, group, last), rows, policies)
        return results

    async def evaluate(self, rows: Rows, policies: Policies) -> dict[PolicyName, Metrics]:
        await each(self.read_reference, rows, policies)
        await self.read_margins(rows, policies)
        return {name: self.measure(own) for name, own in rows.items()}

    async def read_margins(self, rows: Rows, policies: Policies) -> None:
        """Read every policy's log-probs, of the same weights as the others', and sum the margins of each pair."""
        await each(self.read_log_probs, rows, policies)
        share_margins(rows)

    def gradients(self, rows: "TensorDict") -> Tensor:
        return joint_gradients(preference_slope(self.config.loss, rows["margin"], *self._shape), rows)

    def margins(self, rows: "TensorDict") -> Tensor:
        return joint_margins(rows)
