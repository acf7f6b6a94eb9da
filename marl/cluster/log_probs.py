"""Log-probs that a step compares: ``old_log_probs``, of a policy's servers where they agree with its trainer, and the references'."""

import asyncio
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from marl.batch.joint import JointBatch
from marl.batch.kl import KLInReward, correct
from marl.batch.rows import drop_rejected, rows_of, rows_to_check
from marl.cluster.policy_group import PolicyGroup
from marl.config.engines import Sampling, servers_are_comparable
from marl.config.policies import reads_reference, trained_policies
from marl.config.schema import LogProbSource
from marl.report.alarms import warn_of_passes
from marl.report.step_metrics import largest_gap
from marl.types import Metrics, PolicyName
from marl.utils.seeding import derive_seed

Rows = dict[PolicyName, TensorDict]


class OldLogProbs:
    """Writes ``old_log_probs``, and checks the servers' log-probs in every step on some rows of every policy.

    Beyond ``controller.log_prob_gap_bound`` a policy gets the trainer's log-probs for all of its rows: in that step, and until
    such a pass finds every gap within the bound. In half precision every policy begins like that.
    """

    CHECK_KEYS = (*PolicyGroup.FORWARD_KEYS, "turn_index", "rollout_log_probs")

    def __init__(
        self, config: Any, policies: Mapping[PolicyName, PolicyGroup], sampling: Sampling, exact: bool
    ) -> None:
        """``exact``: the learner needs log-probs of the trainer's own forward pass."""
        self.settings, self.seed, self.policies = config.controller, config.seed, policies
        self.source, self.bypass = LogProbSource.of(config), config.algorithm.rollout_correction.bypass_mode
        own = {name: group.config.actor_rollout_ref for name, group in policies.items()}
        asked = own if self.source is LogProbSource.auto and not exact else {}
        comparable = {name for name in asked if servers_are_comparable(config, name, own[name], sampling)}
        self.precision = {name: str(own[name].rollout.dtype) for name in comparable}
        """Precision of comparable policies."""
        self.beyond = {name for name, dtype in self.precision.items() if dtype != "float32"}
        """Comparable policies whose servers were beyond the bound, or are not yet known to be within it."""
        self.warned: set[PolicyName] = set()

    async def write(self, batch: JointBatch, step: int) -> tuple[Rows, Rows, Metrics]:
        """Write ``old_log_probs`` of every row. Returns the rows that the trainers read, their outputs, and each policy's source."""
        samples = {name: rows for name in batch.rows if (rows := self._sample(name, batch, step)) is not None}
        read = {} if self.bypass else dict(batch.rows) | samples
        outputs = await self._compute(read)
        refused = {name: batch.rows[name] for name in self._beyond_bound(samples, outputs, step)}
        outputs |= await self._compute(refused)
        read |= refused
        served = set(batch.rows) if self.bypass else set(samples) - set(refused)
        for name, rows in batch.rows.items():
            rows["old_log_probs"] = rows["rollout_log_probs"] if name in served else outputs[name]["log_probs"]
        self._remember(read, outputs)
        return read, outputs, {f"policy/{name}/log_probs_from_server": float(name in served) for name in batch.rows}

    def _sample(self, name: PolicyName, batch: JointBatch, step: int) -> TensorDict | None:
        """The rows to check of a policy whose servers' log-probs are to be used, as many as divide among its ranks; None for
        a policy whose rows are all read."""
        rows, group = batch.rows[name], self.policies[name]
        trusted = name in self.precision.keys() - self.beyond and bool((rows["version"] == group.version).all())
        if self.bypass or not (trusted or self.source is LogProbSource.server):
            return None
        ranks = group.workers.world_size
        count = -(-self.settings.log_prob_check_rows // ranks) * ranks
        index = rows_to_check(rows, len(batch.agents), count, derive_seed(self.seed, "checked rows", name, step))
        whole = len(index) in (0, len(rows)) and self.source is LogProbSource.auto
        return None if whole else rows_of(rows.select(*self.CHECK_KEYS), index)

    async def _compute(self, read: Rows) -> Rows:
        results = await asyncio.gather(*(self.policies[name].compute_log_prob(rows) for name, rows in read.items()))
        return dict(zip(read, results, strict=True))

    def _is_within(self, rows: TensorDict, output: TensorDict) -> bool:
        return largest_gap(rows, output) <= self.settings.log_prob_gap_bound  # not so for NaN

    def _beyond_bound(self, samples: Rows, outputs: Rows, step: int) -> list[PolicyName]:
        """The policies whose samples show that all rows need the trainer's log-probs; each is warned of once."""
        if self.source is LogProbSource.server:
            return []
        names = [name for name, rows in samples.items() if not self._is_within(rows, outputs[name])]
        new = {name: largest_gap(samples[name], outputs[name]) for name in names if name not in self.warned}
        self.warned |= set(new)
        warn_of_passes(new, step, self.settings.log_prob_gap_bound)
        return names

    def _remember(self, read: Rows, outputs: Rows) -> None:
        seen = self.precision.keys() & set(read)
        self.beyond = self.beyond - seen | {name for name in seen if not self._is_within(read[name], outputs[name])}

    def state_dict(self) -> dict[str, Any]:
        """Policies beyond the bound, and those within it with the precision in which they were found so."""
        within = {name: dtype for name, dtype in self.precision.items() if name not in self.beyond}
        return {"within": within, "beyond": sorted(self.beyond)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a policy whose precision or source has changed begins anew."""
        within = {name for name, dtype in self.precision.items() if state["within"].get(name) == dtype}
        self.beyond = (self.beyond - within) | (self.precision.keys() & set(state["beyond"]))


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
