"""Start worker groups and servers."""

import marl.platform.cpu  # isort: skip - registers the platform before anything of verl asks for one

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import ray
from omegaconf import DictConfig
from verl.plugin.platform import get_platform

import marl.config.schema  # noqa: F401 - registers our groups
from marl.cluster.layout import Part, parts_of
from marl.config.errors import ConfigError
from marl.run_setup import Setup, colocated


def check_cluster(setup: Setup) -> None:
    """Raise ConfigError if the cluster could never give the pools what they ask for."""
    config, pools = setup.config, setup.ranks_by_pool
    resource = get_platform().ray_resource_name()
    needed, there = sum(pools.values()), int(ray.cluster_resources().get(resource, 0))
    if needed > there:
        listed = ", ".join(f"{name}: {ranks}" for name, ranks in pools.items())
        remedy = (
            "They already share a pool where they can; use"
            if colocated(config)
            else "Set resources.placement=colocated, use"
        )
        raise ConfigError(
            f"the pools ask for {needed} {resource} ({listed}; each trainer.nnodes={config.trainer.nnodes} x "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}), the whole cluster has {there}. "
            f"{remedy} fewer ranks, or a larger cluster"
        )
    ranks = config.trainer.n_gpus_per_node
    largest = max((int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if ranks > largest:
        raise ConfigError(
            f"trainer.n_gpus_per_node={ranks}: the ranks of a pool's node are placed on one machine, and the largest has "
            f"{largest} {resource}. Use fewer ranks a node and more trainer.nnodes"
        )


def make_groups(
    setup: Setup, configs: dict[str, DictConfig], cleanup: ExitStack
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worker groups of the policies and of the critics, by name; their models are not loaded yet."""
    from marl.cluster.critic_group import CriticGroup
    from marl.cluster.local import LocalPolicyGroup
    from marl.cluster.policy_group import RayPolicyGroup

    config = setup.config
    policy_group = LocalPolicyGroup if config.resources.one_process else RayPolicyGroup
    groups: dict[str, Any] = {}
    critics: dict[str, Any] = {}
    locks: dict[str, asyncio.Lock] = {}
    for part, workers in start_workers(config, parts_of(setup, configs), cleanup):
        kind, members = (CriticGroup, critics) if part.is_critic else (policy_group, groups)
        own = next(iter(configs.values())) if part.is_critic else configs[part.name]
        members[part.name] = group = kind(
            part.name, own, workers, part.pool, config.resources.timeout_s, locks.setdefault(part.pool, asyncio.Lock())
        )
        cleanup.callback(group.stop)
    return groups, critics


async def start_groups(groups: dict[str, Any], critics: dict[str, Any]) -> None:
    """Pools start at the same time; servers of one pool that share an accelerator one after another, each asleep before the
    next asks for memory."""

    async def one_after_another(members: list[Any]) -> None:
        for group in members:
            await group.start_servers()

    await asyncio.gather(*(group.start_workers() for group in [*groups.values(), *critics.values()]))
    pools: dict[str, list[Any]] = {}
    for group in groups.values():
        pools.setdefault(group.pool if group.rollout.free_cache_engine else group.name, []).append(group)
    await asyncio.gather(*(one_after_another(members) for members in pools.values()))


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
    for pool_name, within in members.items():
        pool = Pool(
            [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
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
