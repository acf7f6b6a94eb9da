"""Pools: the groups of processes in which policies and critics live. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl.config.policies import shares_base
from marl.config.schema import Placement

SHARED = "shared"
"""The pool of adapters, and of colocated policies and critics, that no list names."""


@dataclass(frozen=True)
class PoolSize:
    gpus: int
    """Ranks on each of its nodes."""
    nodes: int

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


def holds_servers(size: PoolSize, ranks: int) -> bool:
    """True if a pool divides into servers of this number of ranks, each on as few machines as it can be: verl gives a server
    consecutive ranks, and starts one that fits on one machine on its first rank's machine, where its other GPUs must be too."""
    return size.ranks % ranks == 0 and (size.gpus % ranks == 0 or ranks % size.gpus == 0)


def colocated(config: Any) -> bool:
    """True if policies and critics that no pool lists share one."""
    return config.resources.placement is Placement.colocated


def pool_of(config: Any, policy: str) -> str:
    """The pool that lists a policy; else the shared one or its own. Adapters share one base, and so a pool."""
    listing = next((name for name, pool in config.resources.pools.items() if policy in pool.policies), None)
    return listing or (SHARED if colocated(config) or shares_base(config) else policy)


def critic_pool(config: Any, critic: str) -> str:
    """The pool that lists a critic; else that of the policies where they are colocated, or its own."""
    listing = next((name for name, pool in config.resources.pools.items() if critic in pool.critics), None)
    return listing or (SHARED if colocated(config) else f"{critic}_critic")


def size_of(config: Any, pool: str) -> PoolSize:
    """A pool's own size, or the run's for what it leaves open."""
    gpus, nodes, pools = config.trainer.n_gpus_per_node, config.trainer.nnodes, config.resources.pools
    if pool not in pools:
        return PoolSize(gpus, nodes)
    return PoolSize(pools[pool].gpus or gpus, pools[pool].nodes or nodes)


def ranks_of(config: Any, policy: str) -> int:
    """The ranks of a policy's worker group: all of its pool's."""
    return size_of(config, pool_of(config, policy)).ranks


def must_fit(pools: Mapping[str, PoolSize], machines: Sequence[int]) -> None:
    """Place each node of each pool on a machine, by the machines' numbers of ranks: the widest nodes first, each where the least
    remains. Raises Unplaceable for a node that fits nowhere."""
    free = list(machines)
    for name, size in sorted(pools.items(), key=lambda item: -item[1].gpus):
        for _ in range(size.nodes):
            fitting = [left for left in free if left >= size.gpus]
            if not fitting:
                raise Unplaceable(
                    f"pool {name!r} asks for {size.nodes} x {size.gpus} ranks, those of a node on one machine; what the wider pools "
                    f"leave free is {', '.join(map(str, free)) or 'nothing'} by machine"
                )
            free[free.index(min(fitting))] -= size.gpus


class Unplaceable(ValueError):
    """Raised by :func:`must_fit`."""
