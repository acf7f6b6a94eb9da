"""A complete credit scheme in one file, which runs its own rollouts: what another first answer would have led to.

VERL_USE_EXTERNAL_MODULES=recipe.regret python -m marl.main learner=grpo credit=regret credit.tries=4 …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners import Credit, Gathered, Rollouts, register_credit
from marl.types import Episode
from marl.utils.numbers import bounded, count


@register_credit("regret")
class Regret(Credit):
    """Advantage of a first answer: the team's score less the best one among its alternatives, each played to the end."""

    kind = "advantage"

    @dataclass
    class Config(Credit.Config):
        tries: int = bounded(4, count(2, 1000))
        """Answers to compare, the recorded one included."""

    config: Config

    async def gather(self, episodes: Sequence[Episode], rollouts: Rollouts) -> Gathered:
        places = [(one, turn) for one in episodes for turn in one.path if turn.round == 1 and rollouts.trained(turn)]
        tries = await rollouts.try_answers(places, self.config.tries, finishes=1)
        for entry in tries.tried:
            best = max(end.scored.value for end in entry.ends)
            entry.at.evidence["best"] = max(best, entry.at.evidence.get("best", best))
        return Gathered({"regret/failed": float(tries.failed)}, tries.tokens)

    def assign(self, batch: JointBatch) -> Tensor:
        return torch.nan_to_num(batch.team_score_E[:, None, None] - batch.evidence_ERA("best"))
