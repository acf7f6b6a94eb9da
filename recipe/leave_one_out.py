"""A whole new learner in one file: a turn's credit relative to what the other agents got in the same round.

VERL_USE_EXTERNAL_MODULES=recipe.leave_one_out python -m marl.main learner=leave_one_out …
"""

from dataclasses import dataclass

from marl.batch.joint import JointBatch
from marl.learners import Learner, broadcast_to_tokens, register_learner
from marl.types import Metrics
from marl.utils.numbers import FINITE, bounded


@register_learner("leave_one_out")
class LeaveOneOut(Learner):
    @dataclass
    class Config(Learner.Config):
        scale: float = bounded(1.0, FINITE)
        """Multiplies the advantage."""

    config: Config

    def assign_credit(self, batch: JointBatch) -> Metrics:
        mask_ERA = batch.spoken_ERA.float()
        credit_ERA = self.credit.of(batch) * mask_ERA
        others_ERA = credit_ERA.sum(-1, keepdim=True) - credit_ERA
        count_ERA = (mask_ERA.sum(-1, keepdim=True) - mask_ERA).clamp(min=1)
        advantages_ERA = self.config.scale * (credit_ERA - others_ERA / count_ERA) * mask_ERA
        for rows in batch.rows.values():
            rows["advantages"] = broadcast_to_tokens(advantages_ERA, rows)
        return {"credit/advantage_abs": float(advantages_ERA.abs().mean())}
