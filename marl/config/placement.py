"""Pools: the groups of processes in which policies and critics live. Pure."""

from dataclasses import dataclass
from typing import Any

from marl.config.schema import Placement

SHARED = "shared"
"""The pool of colocated policies and critics that name none."""


@dataclass(frozen=True)
class PoolSize:
    gpus: int
    """Ranks on each of its nodes."""
    nodes: int

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


def colocated(config: Any) -> bool:
    """True if policies and critics that name no pool share one."""
    return config.resources.placement is Placement.colocated


def pool_of(config: Any, policy: str) -> str:
    named = (config.policies.get(policy) or {}).get("pool")
    return named or (SHARED if colocated(config) else policy)


def critic_pool(config: Any, critic: str) -> str:
    """Beside the policies where they are colocated; else a pool of its own."""
    named = config.resources.critic_pool
    return named or (SHARED if colocated(config) else f"{critic}_critic")


def size_of(config: Any, pool: str) -> PoolSize:
    return PoolSize(config.trainer.n_gpus_per_node, config.trainer.nnodes)


def ranks_of(config: Any, policy: str) -> int:
    """The ranks of a policy's worker group: all of its pool's."""
    return size_of(config, pool_of(config, policy)).ranks
