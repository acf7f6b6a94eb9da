"""Start worker groups and servers."""

import marl.platform.cpu  # isort: skip - registers the platform before anything of verl asks for one

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import ray
from omegaconf import DictConfig
from verl.plugin.platform import get_platform

import marl.config.schema  # noqa: F401 - registers our groups
from marl.cluster.absent_servers import AbsentServers
from marl.cluster.layout import Part, parts_of
from marl.config.deadlines import deadlines_of
from marl.config.errors import ConfigError
from marl.config.placement import Unplaceable, colocated, must_fit, size_of
from marl.config.sources import Source
from marl.run_setup import Setup

POLL_S = 1.0


async def wait_for_cluster(setup: Setup, seconds: float) -> None:
    """Check the cluster; after a fault, a lost node has so many seconds to return. Raises ConfigError, as :func:`check_cluster`, or
    PlacementTimeout then."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return check_cluster(setup)
        except ConfigError as error:
            if not seconds:
                raise
            if time.monotonic() >= ends:
                raise too_small(seconds, error) from None
            await asyncio.sleep(POLL_S)


def too_small(seconds: float, error: ConfigError) -> TimeoutError:
    from marl.cluster.pools import PlacementTimeout

    waited = f"resources.placement_timeout_s={seconds:g} s"
    return PlacementTimeout(f"the cluster is smaller since the fault, and has not grown within {waited}: {error}")


def check_cluster(setup: Setup) -> None:
    """Raise ConfigError if the cluster could never give the pools what they ask for."""
    resource = get_platform().ray_resource_name()
    needed, there = sum(setup.ranks_by_pool.values()), int(ray.cluster_resources().get(resource, 0))
    listed = ", ".join(f"{name}: {size.nodes} x {size.gpus}" for name, size in setup.pools.items())
    if needed > there:
        raise ConfigError(
            f"the pools ask for {needed} {resource} ({listed}; resources.pools.<name>.nodes x gpus, or trainer.nnodes x "
            f"trainer.n_gpus_per_node), the whole cluster has {there}. {remedy_of(setup.config)} fewer ranks, or a larger cluster"
        )
    machines = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    try:
        must_fit(setup.pools, machines)
    except Unplaceable as error:
        raise ConfigError(
            f"{error} (machines of {', '.join(map(str, machines))} {resource}; pools {listed}). Use fewer ranks a node and more nodes "
            "(resources.pools.<name>.{gpus,nodes}, or trainer.n_gpus_per_node and trainer.nnodes)"
        ) from None


def remedy_of(config: DictConfig) -> str:
    return (
        "They already share a pool where they can; use"
        if colocated(config)
        else "Set resources.placement=colocated, use"
    )


def make_groups(
    setup: Setup, configs: dict[str, DictConfig], cleanup: ExitStack
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worker groups of the policies and of the critics, by name; their models are not loaded yet."""
    config = setup.config
    groups: dict[str, Any] = {}
    critics: dict[str, Any] = {}
    locks: dict[str, asyncio.Lock] = {}
    for part, workers in start_workers(config, parts_of(setup, configs), cleanup):
        shared = workers, part.pool, deadlines_of(config.resources), locks.setdefault(part.pool, asyncio.Lock())
        made = groups_of(part, configs, config, shared)
        (critics if part.is_critic else groups).update(made)
        for group in made.values():
            cleanup.callback(group.stop)
    return {name: groups[name] for name in configs}, {name: critics[name] for name in setup.pool_by_critic}


def groups_of(part: Part, configs: dict[str, DictConfig], config: DictConfig, shared: tuple) -> dict[str, Any]:
    """The groups that have their workers in a part: one, or one for each of its adapters. A method that plays nothing needs no
    servers."""
    from marl.cluster.critic_group import CriticGroup
    from marl.cluster.policy_group import PolicyGroup, SharedBase

    if part.is_critic:
        return {part.name: CriticGroup(part.name, next(iter(configs.values())), *shared)}
    base = SharedBase(part.adapters[0]) if part.adapters else None
    facts: dict[str, Any] = {
        "plays": Source.of(config) is Source.play,
        "takes_weights": not part.is_frozen,
        "base": base,
    }
    names = part.adapters or (part.name,)
    return {name: PolicyGroup(name, configs[name], *shared, **facts) for name in names}


async def start_groups(groups: dict[str, Any], critics: dict[str, Any], servers: bool = True) -> None:
    """Pools start at the same time; servers of one pool that share an accelerator one after another, each asleep before the
    next asks for memory. ``servers=False`` starts none."""

    async def one_after_another(members: list[Any]) -> None:
        for group in members:
            await group.start_servers()

    await asyncio.gather(*(group.start_workers() for group in [*groups.values(), *critics.values()]))
    if not servers:
        for group in groups.values():
            group.servers = AbsentServers(group.name)
        return
    pools: dict[str, list[Any]] = {}
    for group in groups.values():
        pools.setdefault(group.pool if waits_for_its_pool(group) else group.name, []).append(group)
    await asyncio.gather(*(one_after_another(members) for members in pools.values()))


def waits_for_its_pool(group: Any) -> bool:
    """True for servers that start one after another: those that sleep while others start, and engines that measure the free
    memory of the GPU that they share."""
    rollout = group.rollout
    return bool(rollout.free_cache_engine or (rollout.name != "hf" and group.config.trainer.device != "cpu"))


def start_workers(config: DictConfig, parts: list[Part], cleanup: ExitStack) -> Iterator[tuple[Part, Any]]:
    """A worker group for every part: processes of its own, or of its pool's if that holds several parts."""
    if config.resources.one_process:
        from marl.cluster.local import LocalWorkers

        for part in parts:
            yield part, LocalWorkers(part.worker(**part.arguments))
        return
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    from marl.cluster.pools import Pool

    device, start = config.trainer.device, uuid.uuid4().hex[:8]  # a baseline starts while the team's actors still end
    members: dict[str, list[Part]] = {}
    for part in parts:
        members.setdefault(part.pool, []).append(part)
    # widest first, as they were placed: Ray gives a node to the emptiest machine, which a wide pool may need whole
    for pool_name, within in sorted(members.items(), key=lambda member: -size_of(config, member[0]).gpus):
        size = size_of(config, pool_name)
        pool = Pool(
            [size.gpus] * size.nodes,
            use_gpu=get_platform().ray_resource_name() != "CPU",
            max_colocate_count=1,
            name_prefix=pool_name,
            timeout=config.resources.placement_timeout_s,
        )
        cleanup.callback(pool.release)
        classes = {part.key: RayClassWithInitArgs(ray.remote(part.worker), **part.arguments) for part in within}
        if len(within) == 1:
            (part,) = within
            yield part, RayWorkerGroup(pool, classes[part.key], name_prefix=f"{part.key}_{start}", device_name=device)
        else:
            together = RayWorkerGroup(
                pool, create_colocated_worker_cls(classes), name_prefix=f"{pool_name}_{start}", device_name=device
            )
            spawned = together.spawn(classes.keys())
            yield from ((part, spawned[part.key]) for part in within)
