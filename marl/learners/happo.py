"""HAPPO: MAPPO whose policies are updated one after another, each corrected for the earlier updates (arXiv:2109.11251).

MARFT (arXiv:2504.16129) brings it to language models, with ``learner.chain=true``.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import II

from marl.batch.joint import JointBatch
from marl.learners import ratios
from marl.learners.base import register_learner
from marl.learners.credit_schemes import Credit
from marl.learners.mappo import MAPPO
from marl.learners.ratios import Ratio
from marl.types import Metrics, PolicyGroup, PolicyName
from marl.utils.numbers import Number, bounded, count
from marl.utils.seeding import derive_seed


@register_learner("happo")
class HAPPO(MAPPO):
    """In a fresh random order, every policy's advantages are multiplied by M before its update:

        M(episode, lap) = product of pi_new / pi_old of the lap's turns of policies updated already in this step

    A *lap* is a joint action: a maximal run of rounds in which no agent speaks twice. Where all answer in every round it is the
    round; where agents speak in turn (chain, critique, router) it is once around the team, as in MARFT. Agents that share a policy are updated together and do not correct one another. A turn that is not trained, and so has no
    row, counts as 1.
    """

    joint_actions = True
    needs_exact_log_probs = True

    @dataclass
    class Config(MAPPO.Config):
        ratio: Ratio = Ratio.geometric
        clip: float | None = bounded(2.0, Number(1, null=True))
        """M is kept between its inverse and this; null for the exact form."""
        seed: int = bounded(II("seed"), count(0))
        """Seed of the order of updates."""

    config: Config

    def __init__(self, config: Config, credit: Credit) -> None:
        super().__init__(config, credit)
        self.num_updates = 0

    async def update(self, batch: JointBatch, policies: Mapping[PolicyName, PolicyGroup]) -> dict[PolicyName, Metrics]:
        """Update one policy after another. New log-probs are asked for where a later policy spoke in the same lap."""
        order = self.order(name for name in batch.rows if name in policies)
        self.num_updates += 1
        log_ratios_ERA = torch.zeros(batch.spoken_ERA.shape)
        metrics: dict[PolicyName, Metrics] = {}
        for position, name in enumerate(order, start=1):
            rows, later = batch.rows[name], [batch.rows[other] for other in order[position:]]
            log_factors_ERA = ratios.log_factors(log_ratios_ERA, batch)
            factors_ERA = ratios.factors(log_factors_ERA, self.config.clip)
            numbers = await policies[name].update_actor(ratios.corrected(rows, factors_ERA))
            metrics[name] = (
                numbers
                | ratios.factor_metrics(log_factors_ERA, factors_ERA, rows)
                | {"update_position": float(position)}
            )
            if any(ratios.share_laps(rows, others, batch) for others in later):
                output = await policies[name].compute_log_prob(rows)
                log_ratios_ERA += ratios.log_ratios(output["log_probs"], rows, log_ratios_ERA.shape, self.config.ratio)
        return metrics

    def order(self, names: Iterable[PolicyName]) -> list[PolicyName]:
        """These policies in this step's order, which the seed and the number of updates before it alone decide."""
        shuffled = sorted(names)
        random.Random(derive_seed(self.config.seed, "order of updates", self.num_updates)).shuffle(shuffled)
        return shuffled

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.expect_state(state, ("num_updates",))
        self.num_updates = state["num_updates"]
