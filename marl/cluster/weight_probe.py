"""Proof by log-probs, for servers whose weights cannot be read: each answers a short prompt after every sync, and its log-probs are
compared with its trainer's, and with its own at the last sync."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl.workers.rollout.replica import TokenOutput

from marl.batch.build import to_rows
from marl.cluster.failures import WeightsNotArrived
from marl.cluster.policy_group import PolicyGroup
from marl.config.engines import PROBE, PROBE_TOKENS
from marl.types import PolicyName, Turn
from marl.utils.seeding import derive_seed

MEAN_SHARE = 0.1
"""Bound of the mean gap, as a share of the largest gap's (``controller.log_prob_gap_alarm``)."""
MOVED_SHARE, MOVED_LEAST = 1e-3, 1e-5
"""Change of the trainer's log-probs which a server that was synced must have followed, as a share of the same bound and in nats:
above the rounding of a log-prob."""


class Probe(NamedTuple):
    """A policy's prompt and sampling, the same at every sync."""

    prompt_ids: list[int]
    sampling: dict[str, Any]


class Answer(NamedTuple):
    """A server's answer at a step, with its own log-probs and the trainer's."""

    step: int
    version: int | None
    token_ids: tuple[int, ...]
    served: tuple[float, ...]
    trained: tuple[float, ...]

    def repeats(self, other: "Answer") -> bool:
        return (self.token_ids, self.served) == (other.token_ids, other.served)


class ProbeProof:
    """Sees weights of another model at once, and a server that stayed where it was as soon as its trainer has moved."""

    def __init__(
        self, seed: int, policies: Mapping[PolicyName, PolicyGroup], clients: Mapping[PolicyName, Any]
    ) -> None:
        self.policies = policies
        self.probes = {name: probe_of(clients[name], derive_seed(seed, "probe", name) % 2**31) for name in policies}
        self.earlier: dict[tuple[PolicyName, int], Answer] = {}
        """Each server's last answer, of the first step in which it gave it."""

    async def prove(self, step: int) -> None:
        answers = await asyncio.gather(*(self._ask(name, step) for name in self.policies))
        for (name, group), given in zip(self.policies.items(), answers, strict=True):
            for index, answer in enumerate(given):
                before = self.earlier.get((name, index))
                if problem := problem_of(answer, before, group.gap_alarm):
                    raise WeightsNotArrived(name, group.server_name(index), step, problem)
                if before is None or not answer.repeats(before):
                    self.earlier[name, index] = answer

    async def _ask(self, name: PolicyName, step: int) -> list[Answer]:
        group, probe = self.policies[name], self.probes[name]
        outputs = await group.ask_servers(*probe)
        chains = [[(turn_of(name, probe.prompt_ids, output), 0)] for output in outputs]
        computed = await group.compute_log_prob(to_rows(chains, {name: probe.sampling["temperature"]}))
        return [
            Answer(
                step,
                version_of(output),
                tuple(output.token_ids),
                tuple(output.log_probs or ()),
                tuple(log_probs.tolist()),
            )
            for output, log_probs in zip(outputs, computed["log_probs"].unbind(), strict=True)
        ]


def probe_of(client: Any, seed: int) -> Probe:
    """A prompt in the policy's own chat template, and a request that draws from the whole distribution."""
    rollout = client.rollout
    prompt_ids = list(client.encoder.encode(PROBE))[-rollout.prompt_length :]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    sampling["max_tokens"] = min(PROBE_TOKENS, rollout.response_length)
    return Probe(prompt_ids, sampling | {"ignore_eos": True, "logprobs": True, client.seed_key: seed})


def turn_of(name: PolicyName, prompt_ids: Sequence[int], output: TokenOutput) -> Turn:
    ids, log_probs = list(output.token_ids), list(output.log_probs or ())
    return Turn(
        name, 1, [], "", policy=name, prompt_ids=list(prompt_ids), response_ids=ids, response_mask=[1] * len(ids), log_probs=log_probs
    )  # fmt: skip


def version_of(output: TokenOutput) -> int | None:
    """The step that the server says its weights are of; None for an engine that does not say."""
    return (output.extra_fields or {}).get("global_steps")


def problem_of(answer: Answer, before: Answer | None, bound: float) -> str | None:
    """A description of what is wrong with a server's answer; None if nothing is. ``bound``: of the largest gap."""
    if answer.version not in (None, answer.step):
        return f"it reports weights of step {answer.version}"
    if len(answer.served) != len(answer.trained) or not answer.served:
        return f"it gave {len(answer.served)} log-probs for {len(answer.token_ids)} tokens"
    largest, mean = gaps(answer.served, answer.trained)
    if not (largest <= bound and mean <= MEAN_SHARE * bound):  # not so for NaN
        return (
            f"the log-probs of its answer to a probe differ from the trainer's by up to {largest:.2g} and by {mean:.2g} on average; "
            f"expected at most {bound:g} (controller.log_prob_gap_alarm) and {MEAN_SHARE * bound:g}"
        )
    if before is not None and answer.repeats(before):
        moved, _ = gaps(answer.trained, before.trained)
        if moved > max(MOVED_SHARE * bound, MOVED_LEAST):
            return (
                f"it repeats its answer of step {before.step} to the last bit, and the trainer's log-probs of that answer have moved "
                f"by up to {moved:.2g} since: a sync was skipped, or lost the weights"
            )
    return None


def gaps(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The largest difference and the mean one; NaN where one is."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    largest = sum(differences) if any(x != x for x in differences) else max(differences)
    return largest, sum(differences) / len(differences)
