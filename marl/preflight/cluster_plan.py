"""Placement of a run's pools on a cluster that is described in words, ``2x8x80GB``: what fits where, and what would."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from marl.config.copies import copied
from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies
from marl.config.placement import PoolSize, Unplaceable, holds_servers, machines_of
from marl.config.policies import own_settings, ranks_per_server
from marl.config.schema import PoolConfig
from marl.preflight import memory_plan, save_copies, shared_gpus
from marl.preflight.checks import CheckedSetup
from marl.preflight.plan_report import memory_text, peaks_of, pool_members, step_text, work_text
from marl.utils.tables import aligned

NUMBER = r"\d+(?:\.\d+)?"
WORDS = re.compile(rf"(\d+)x(\d+)x({NUMBER})GB(?:@({NUMBER})TFLOPS)?", re.IGNORECASE)
WIDEST = 64
"""Ranks of the largest pool that is tried as a remedy."""


@dataclass(frozen=True)
class Cluster:
    machines: int
    gpus: int
    """GPUs of each machine."""
    card: float
    """Bytes of an accelerator."""
    rate: float | None = None
    """Operations that it reaches in a second, where known."""

    @classmethod
    def of(cls, words: str) -> "Cluster":
        match = WORDS.fullmatch(words)
        if match is None or not all(float(number) for number in match.groups() if number):
            raise ConfigError(
                f"--cluster {words}: expected machines x GPUs of each x memory of a GPU, as in 2x8x80GB, and if it is known the "
                "rate that a GPU reaches in training, as in 2x8x80GB@400TFLOPS"
            )
        return cls(int(match[1]), int(match[2]), float(match[3]) * 1e9, float(match[4]) * 1e12 if match[4] else None)


def cluster_plan(setup: CheckedSetup, cluster: Cluster) -> tuple[str, list[str]]:
    """The plan as text, and what does not fit, each with what would."""
    members, asleep = pool_members(setup, cluster.card)
    peaks = peaks_of(members, asleep)
    problems = [*too_large(setup, cluster, peaks), *unplaced(setup, cluster)]
    parts = [*step_text(setup), work_text(setup, cluster.rate), memory_text(members, asleep)]
    parts += save_copies.text_of(save_copies.copies_of(setup, members))
    parts.append(placement_text(setup, cluster, peaks))
    return "\n".join([*parts, *(f"does not fit: {problem}" for problem in problems)]), problems


def placement_text(setup: CheckedSetup, cluster: Cluster, peaks: dict[str, float]) -> str:
    """The pools by machine, as far as they can be placed."""
    try:
        placed = machines_of(setup.pools, [cluster.gpus] * cluster.machines)
    except Unplaceable:
        return "placement: none"
    rows = [("pool", "members", "ranks", "machines", "GB of a GPU")]
    for name, size in setup.pools.items():
        members = [policy for policy, pool in setup.pool_by_policy.items() if pool == name]
        members += [f"{critic} critic" for critic, pool in setup.pool_by_critic.items() if pool == name]
        where = ",".join(map(str, placed[name]))
        share = f"{peaks[name] / 1e9:.1f} of {cluster.card / 1e9:.1f}"
        rows.append((name, ",".join(members), f"{size.nodes} x {size.gpus}", where, share))
    free = cluster.machines * cluster.gpus - sum(size.ranks for size in setup.pools.values())
    return "\n".join([f"placement (free GPUs: {free}):", *aligned(rows)])


def too_large(setup: CheckedSetup, cluster: Cluster, peaks: dict[str, float]) -> Iterator[str]:
    """Pools whose ranks need more memory than a GPU has."""
    for name, peak in peaks.items():
        if peak > cluster.card:
            needed = f"pool {name!r} needs {peak / 1e9:.1f} GB a rank, a GPU has {cluster.card / 1e9:.1f} GB"
            yield f"{needed}; {remedy_of(setup, cluster, name)}"
        yield from starved(setup, cluster, name)


def starved(setup: CheckedSetup, cluster: Cluster, pool: str) -> Iterator[str]:
    """A pool's servers whose weights do not fit into their shares of a GPU."""
    rollouts = {name: own_settings(setup.config, name).rollout for name in shared_gpus.members_of(setup, pool)}
    engines = {name: rollout for name, rollout in rollouts.items() if shared_gpus.reserves(rollout)}
    for name, rollout in engines.items():
        if room := memory_plan.room_for_weights(rollout, setup.sizes[name], cluster.card):
            remedy = more_room(setup, cluster, engines) if len(engines) > 1 else more_share(setup, cluster, name, room)
            yield (
                f"policy {name!r}: the weights of its server need {room.needed / 1e9:.1f} GB a rank, but its share of a GPU is "
                f"{room.share / 1e9:.1f} GB; {remedy}"
            )


def more_share(setup: CheckedSetup, cluster: Cluster, name: str, room: memory_plan.Room) -> str:
    """A remedy for the only server of a GPU; adapters share the settings of their base."""
    key = "actor_rollout_ref" if name in adapter_policies(setup.config) else f"policies.{name}"
    rollout, gpus = own_settings(setup.config, name).rollout, cluster.machines * cluster.gpus
    return memory_plan.remedy_for_weights(room, rollout, cluster.card, shared_gpus.MOST, gpus, key)


def more_room(setup: CheckedSetup, cluster: Cluster, engines: Mapping[str, Any]) -> str:
    """A remedy for servers that share a GPU: a larger share of one would starve another."""
    weights = {name: memory_plan.weights_of_rank(rollout, setup.sizes[name]) for name, rollout in engines.items()}
    shares = shared_gpus.shares_that_fit(weights, cluster.card)
    apart = "give each policy its own pool, as resources.placement=separate does"
    return f"{apart}, or each a share of its own: {shares}" if shares else apart


def remedy_of(setup: CheckedSetup, cluster: Cluster, pool: str) -> str:
    """The smallest size of a pool that fits into the memory of its GPUs, with the key that sets it."""
    size = next(
        (size for size in larger(setup, cluster, pool) if fits(resized(setup, pool, size), cluster, pool)), None
    )
    if size is None:
        return (
            "more ranks do not help; lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or rollout.gpu_memory_utilization, "
            "set resources.placement=separate, or use a smaller model"
        )
    return f"resources.pools.{pool}={{gpus:{size.gpus},nodes:{size.nodes}}} would fit"


def larger(setup: CheckedSetup, cluster: Cluster, pool: str) -> Iterator[PoolSize]:
    """Larger sizes of a pool whose ranks divide into servers, and that the cluster can hold alone."""
    now = setup.pools[pool].ranks
    servers = [
        ranks_per_server(own_settings(setup.config, name).rollout)
        for name, own in setup.pool_by_policy.items()
        if own == pool
    ]
    for ranks in range(now + 1, min(WIDEST, cluster.machines * cluster.gpus) + 1):
        nodes = -(-ranks // cluster.gpus)
        size = PoolSize(ranks // nodes, nodes)
        if size.ranks == ranks and all(holds_servers(size, each) for each in servers):
            yield size


def resized(setup: CheckedSetup, pool: str, size: PoolSize) -> CheckedSetup:
    """The run with another size of one pool."""
    config = copied(setup.config)
    OmegaConf.set_struct(config, False)
    config.resources.pools[pool] = PoolConfig(size.gpus, size.nodes, **members_of(setup, pool))
    return CheckedSetup(**(vars(setup) | {"config": config}))


def members_of(setup: CheckedSetup, pool: str) -> dict[str, list[str]]:
    return {
        "policies": [name for name, own in setup.pool_by_policy.items() if own == pool],
        "critics": [name for name, own in setup.pool_by_critic.items() if own == pool],
    }


def fits(setup: CheckedSetup, cluster: Cluster, pool: str) -> bool:
    return peaks_of(*pool_members(setup, cluster.card))[pool] <= cluster.card


def unplaced(setup: CheckedSetup, cluster: Cluster) -> Iterator[str]:
    """The pool that finds no machine."""
    there, needed = cluster.machines * cluster.gpus, sum(setup.ranks_by_pool.values())
    try:
        machines_of(setup.pools, [cluster.gpus] * cluster.machines)
    except Unplaceable as error:
        shared = max(size.ranks for size in setup.pools.values())
        movable = sum(name not in setup.config.resources.pools for name in setup.pools)  # members listed elsewhere stay
        colocating = shared <= there < needed and movable > 1
        remedy = "resources.placement=colocated" if colocating else "fewer ranks a node and more nodes"
        yield f"{error}; all pools ask for {needed} of {there} GPUs. {remedy} would fit, as would a larger cluster"
