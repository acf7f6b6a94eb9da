"""Weight syncs, each with a proof that the servers hold their trainers' weights. A run stops where they do not."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from marl.cluster.failures import WeightsNotArrived
from marl.cluster.policy_group import PolicyGroup
from marl.cluster.weight_probe import ProbeProof
from marl.config.engines import check_of
from marl.config.schema import WeightCheck
from marl.types import Metrics, PolicyName
from marl.utils.seeding import derive_seed
from marl.utils.weight_digest import Digest, Held, differing

Groups = Mapping[PolicyName, PolicyGroup]


class Proof(Protocol):
    async def prove(self, step: int) -> None:
        """Raises WeightsNotArrived for a server that does not hold the weights of this step."""


class WeightSync:
    """Ships the policies' weights, and compares digests with ``hf`` servers, log-probs with others (``resources.weight_check``)."""

    def __init__(self, config: Any, policies: Groups, clients: Mapping[PolicyName, Any]) -> None:
        """``clients``: each policy's client, which encodes its probe."""
        wanted = WeightCheck(config.resources.weight_check)
        self.policies = policies
        synced = {name: group for name, group in policies.items() if group.takes_weights}
        checked = {} if wanted is WeightCheck.none else synced

        def checked_by(check: WeightCheck) -> dict[PolicyName, PolicyGroup]:
            return {name: group for name, group in checked.items() if check_of(wanted, group.rollout.name) is check}

        digests, probes = checked_by(WeightCheck.digest), checked_by(WeightCheck.probe)
        self.digests = DigestProof(config.seed, digests)
        self.proofs: list[Proof] = [self.digests] if digests else []
        self.proofs += [ProbeProof(config.seed, probes, clients)] if probes else []

    @property
    def proven(self) -> dict[PolicyName, Digest]:
        """Digests of the weights that ``hf`` servers were last proved to hold."""
        return self.digests.earlier.expected if self.digests.earlier else {}

    async def to_step(self, step: int) -> Metrics:
        """Give every policy's weights to its servers, all at once. Raises WeightsNotArrived, which names policy and server."""
        await asyncio.gather(*(group.sync_weights(step) for group in self.policies.values()))
        started = time.perf_counter()
        await asyncio.gather(*(proof.prove(step) for proof in self.proofs))
        return {"timing_s/weight_check": time.perf_counter() - started} if self.proofs else {}


class Earlier(NamedTuple):
    """The trainers' weights at the last proof."""

    step: int
    seed: int
    expected: dict[PolicyName, Digest]


class DigestProof:
    """Compares a digest that the trainer's ranks compute of their shards with one that the server computes of its own model."""

    def __init__(self, seed: int, policies: Groups) -> None:
        self.seed, self.policies = seed, policies
        self.earlier: Earlier | None = None

    async def prove(self, step: int) -> None:
        seed = digest_seed(self.seed, step)
        digests, accounts = await asyncio.gather(
            asyncio.gather(*(group.weight_digest(seed) for group in self.policies.values())),
            asyncio.gather(*(group.held_weights(seed) for group in self.policies.values())),
        )
        expected = dict(zip(self.policies, digests, strict=True))
        for (name, digest), servers in zip(expected.items(), accounts, strict=True):
            for index, held in enumerate(servers):
                if held != Held(step, digest):
                    problem = await self._problem(name, index, step, held, expected)
                    raise WeightsNotArrived(name, self.policies[name].server_name(index), step, problem)
        self.earlier = Earlier(step, seed, expected)

    async def _problem(
        self, name: PolicyName, index: int, step: int, held: Held, expected: dict[PolicyName, Digest]
    ) -> str:
        wrong = differing(expected[name], held.digest)
        if not wrong:
            return f"it reports weights of step {held.version}, expected {step}"
        found = f"{len(wrong)} of {len(expected[name])} tensors differ ({listed(wrong)})"
        for other, digest in expected.items():
            if other != name and agree(wrong, held.digest, digest):
                return f"{found}, and are those of policy {other!r}: its weights went to this server"
        if self.earlier and agree(wrong, await self._held_before(name, index), self.earlier.expected[name]):
            return f"{found}, and are still those of step {self.earlier.step}: the sync was skipped, or lost them"
        return f"{found}, and match no policy"

    async def _held_before(self, name: PolicyName, index: int) -> Digest:
        """The server's present weights, read as at the last proof."""
        assert self.earlier is not None
        return (await self.policies[name].held_weights(self.earlier.seed))[index].digest


def digest_seed(seed: int, step: int) -> int:
    """Seed of the sample of numbers that is read at a step; each step reads others."""
    return derive_seed(seed, "weights", step)


def agree(names: list[str], one: Digest, other: Digest) -> bool:
    """True if these tensors are the same in both."""
    return all(name in one and one[name] == other.get(name) for name in names)


def listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
