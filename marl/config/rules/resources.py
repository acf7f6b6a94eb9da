"""Rules about pools, ranks, servers and processes."""

from math import gcd
from typing import Any

from marl.config.engines import engine_settings
from marl.config.errors import ConfigError
from marl.config.placement import PoolSize, holds_servers, pool_of, size_of
from marl.config.policies import hosted_policies, own_settings, ranks_per_server, shares_base, trained_policies, within
from marl.config.schema import WeightCheck
from marl.utils.registry import did_you_mean

CPU_RANKS = 64
"""The most ranks of a pool on CPUs, where each is a process."""


def pools_have_members(config: Any) -> None:
    """A policy or critic is in one list at most, each list names policies of this run, and somebody lives in each pool."""
    known, pools = hosted_policies(config), config.resources.pools
    inhabited = {pool_of(config, policy) for policy in known}
    listed: dict[tuple[str, str], str] = {}
    for name, pool in pools.items():
        key = f"resources.pools.{name}"
        for policy in pool.policies:
            if policy not in known:
                raise ConfigError(
                    f"{key}.policies={list(pool.policies)}: this run loads no policy {policy!r}; expected some of "
                    f"{', '.join(known)}, without policies of endpoints.{did_you_mean(policy, known)}"
                )
        for kind, member in [("policies", one) for one in pool.policies] + [("critics", one) for one in pool.critics]:
            if (kind, member) in listed:
                raise ConfigError(f"{key}.{kind}: {member!r} is in {listed[kind, member]} too; expected it once")
            listed[kind, member] = f"{key}.{kind}"
        if name not in inhabited and not pool.critics:
            raise ConfigError(
                f"{key}: it has no members; list some of {', '.join(known)} in {key}.policies, or a critic in {key}.critics, or "
                "leave it out"
            )


def ranks_divide_among_servers(config: Any) -> None:
    for name in hosted_policies(config):
        pool, servers = pool_of(config, name), ranks_per_server(own_settings(config, name).rollout)
        size = size_of(config, pool)
        keys = f"resources.pools.{pool}.gpus x nodes"
        where = keys if pool in config.resources.pools else "trainer.nnodes x trainer.n_gpus_per_node"
        if size.ranks % servers:
            raise ConfigError(
                f"{within(config, name)}a policy's {size.ranks} ranks ({where}) do not divide into servers of "
                f"{servers} (rollout.tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size): "
                f"{size.ranks} % {servers} = {size.ranks % servers}. Use a multiple"
            )
        if not holds_servers(size, servers):
            raise ConfigError(
                f"{within(config, name)}a policy's servers of {servers} ranks (rollout.tensor_model_parallel_size x "
                f"data_parallel_size x pipeline_model_parallel_size) would lie across machines of {size.gpus} ranks each "
                f"({where}): expected servers that divide a machine's ranks, or that fill whole machines. Use "
                f"another number of ranks a machine, or servers of {gcd(servers, size.gpus)}"
            )


def digests_are_of_hf(config: Any) -> None:
    """Servers of policies that nobody trains are sent no weights, and have nothing to prove."""
    if config.resources.weight_check is not WeightCheck.digest:
        return
    for name in trained_policies(config.agents):
        engine = own_settings(config, name).rollout.name
        if engine != "hf":
            raise ConfigError(
                f"{within(config, name)}resources.weight_check=digest: rollout.name={engine} stores weights in a form of its own, "
                "which has no digest to compare; expected hf servers, use probe, or auto for the fitting one"
            )


def a_cpu_has_its_engines(config: Any) -> None:
    if config.trainer.device != "cpu":
        return
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.strategy != "fsdp2":
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={actor.strategy} does not run on a CPU; use fsdp2 (hardware=cpu sets it)"
        )
    if rollout.name == "vllm" and engine_settings(rollout).get("worker_extension_cls"):  # as hardware=cpu_vllm sets it
        return
    if rollout.name != "hf":
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={rollout.name} does not run on a CPU; use hf (hardware=cpu sets it), or "
            "hardware=cpu_vllm for vllm"
        )


def one_process_is_one_rank(config: Any) -> None:
    resources, engine = config.resources, config.actor_rollout_ref.rollout.name
    if not resources.one_process:
        return
    for keys, size in sizes(config).items():
        if size.ranks != 1:
            raise ConfigError(
                f"resources.one_process=true has one rank, and {keys} ask for {size.ranks}; set both to 1"
            )
    if engine != "hf":
        raise ConfigError(
            f"resources.one_process=true serves with hf, not with actor_rollout_ref.rollout.name={engine}; use hf"
        )
    if config.controller.num_workers:
        raise ConfigError(
            f"controller.num_workers={config.controller.num_workers}: with resources.one_process=true the driver plays the "
            "episodes itself; set it to 0, or resources.one_process=false"
        )


def cpu_ranks_are_limited(config: Any) -> None:
    for keys, size in sizes(config).items():
        if config.trainer.device == "cpu" and size.ranks > CPU_RANKS:
            raise ConfigError(f"{keys}: expected at most {CPU_RANKS} ranks on CPUs, each of which is a process")


def sizes(config: Any) -> dict[str, PoolSize]:
    """Sizes of pools, by the keys and values that decide them."""
    trainer, pools = config.trainer, {name: size_of(config, name) for name in config.resources.pools}
    run = f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    of_pools = {
        f"resources.pools.{name}.nodes={size.nodes} x resources.pools.{name}.gpus={size.gpus}": size
        for name, size in pools.items()
    }
    return {run: PoolSize(trainer.n_gpus_per_node, trainer.nnodes)} | of_pools


def hf_serves_whole_models(config: Any) -> None:
    own = config.actor_rollout_ref
    alone = own.model.lora_rank and not shares_base(config)
    if own.rollout.name == "hf" and alone and not own.model.lora.merge:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={own.model.lora_rank}: rollout.name=hf serves whole models, and is sent "
            "adapters alone; set actor_rollout_ref.model.lora.merge=true, lora_rank=0, or sharing=lora, which serves adapters"
        )


RULES = (pools_have_members, ranks_divide_among_servers, digests_are_of_hf)
POLICY_RULES = (a_cpu_has_its_engines, one_process_is_one_rank, hf_serves_whole_models, cpu_ranks_are_limited)
