"""Every policy's distance to its reference, and of its servers to its trainer."""

import asyncio
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from marl.batch.joint import JointBatch
from marl.batch.kl import KLInReward, correct
from marl.batch.rows import drop_rejected
from marl.cluster.policy_group import PolicyGroup
from marl.config.policies import reads_reference, trained_policies
from marl.types import Metrics, PolicyName


class References:
    """Reference log-probs of the policies that have a reference, and rollout correction where it is configured."""

    def __init__(self, config: Any, policies: Mapping[PolicyName, PolicyGroup]) -> None:
        self.algorithm, self.update_freq = config.algorithm, config.trainer.ref_update_freq
        algorithm, trained = config.algorithm, trained_policies(config.agents)
        self.groups = {name: policies[name] for name in trained if reads_reference(config, policies[name].actor)}
        self.renewed: set[PolicyName] = set()
        """Policies whose reference is no longer the model's initial weights, which are on disk."""
        self.penalties = {name: KLInReward(algorithm) for name in self.groups if algorithm.use_kl_in_reward}
        correction = algorithm.rollout_correction
        # in bypass mode the loss itself corrects
        self.corrects = bool((correction.rollout_is or correction.rollout_rs) and not correction.bypass_mode)

    async def compare(self, batch: JointBatch) -> dict[PolicyName, Metrics]:
        """Write ``ref_log_prob``, ``kl_penalty`` and ``rollout_is_weights`` into the rows, each where it is asked for."""
        metrics: dict[PolicyName, Metrics] = {name: {} for name in batch.rows}
        names = [name for name in batch.rows if name in self.groups]
        results = await asyncio.gather(*(self.groups[name].compute_ref_log_prob(batch.rows[name]) for name in names))
        for name, output in zip(names, results, strict=True):
            batch.rows[name]["ref_log_prob"] = output["log_probs"]
            if name in self.penalties:
                metrics[name] |= self.penalties[name].penalise(batch.rows[name])
        if self.corrects:
            for name, rows in batch.rows.items():
                metrics[name] |= correct(rows, self.algorithm.rollout_correction)
            drop_rejected(batch)
        return metrics

    async def renew(self, step: int) -> None:
        """Give every reference its policy's weights, every ``trainer.ref_update_freq`` steps."""
        if self.update_freq > 0 and step % self.update_freq == 0:
            await asyncio.gather(*(group.renew_reference() for group in self.groups.values()))
            self.renewed = set(self.groups)

    async def save(self, folder: Path, beside: bool = True) -> list[Path]:
        """Write the references that were renewed, in this run or before its resume. Returns the marks of their ranks."""
        work = (self.groups[name].save_reference(folder / name / "ref", beside) for name in sorted(self.renewed))
        return list(chain.from_iterable(await asyncio.gather(*work)))

    async def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        saved = [name for name in self.groups if (folder / name / "ref").is_dir()]
        await asyncio.gather(*(self.groups[name].load_reference(folder / name / "ref") for name in saved))
        self.renewed = set(saved)
        for name in set(self.penalties) & set(state):
            self.penalties[name].load_state_dict(state[name])

    def state_dict(self) -> dict[str, Any]:
        return {name: penalty.state_dict() for name, penalty in self.penalties.items()}
