"""Rules about ranks, servers and processes."""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from marl.config.deadlines import Phase, deadline_of
from marl.config.endpoints import has_endpoint, hosted_policies
from marl.config.engines import engine_settings
from marl.config.errors import ConfigError
from marl.config.placement import PoolSize, holds_servers, pool_of, size_of
from marl.config.policies import own_settings, ranks_per_server, trained_policies, within
from marl.config.schema import WeightCheck
from marl.config.sharing import shares_base
from marl.utils.registry import did_you_mean


def ranks_divide_among_servers(config: Any) -> None:
    for name in hosted_policies(config):
        pool, size = pool_of(config, name), size_of(config, pool_of(config, name))
        servers = ranks_per_server(own_settings(config, name).rollout)
        if size.ranks % servers:
            raise ConfigError(
                f"{within(config, name)}a policy's {size.ranks} ranks ({sizes_of(config, pool)}) do not divide into servers of "
                f"{servers} (rollout.tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size): "
                f"{size.ranks} % {servers} = {size.ranks % servers}. Use a multiple"
            )
        if not holds_servers(size, servers):
            raise ConfigError(
                f"{within(config, name)}a policy's servers of {servers} ranks (rollout.tensor_model_parallel_size x "
                f"data_parallel_size x pipeline_model_parallel_size) would lie across machines of {size.gpus} ranks each "
                f"({sizes_of(config, pool)}): expected servers that divide a machine's ranks, or that fill whole machines. Use "
                f"another number of ranks a machine, or servers of {gcd(servers, size.gpus)}"
            )


def sizes_of(config: Any, pool: str) -> str:
    """The keys that decide a pool's number of ranks."""
    keys = f"resources.pools.{pool}" if pool in config.resources.pools else ""
    return f"{keys}.gpus x {keys}.nodes" if keys else "trainer.nnodes x trainer.n_gpus_per_node"


def pools_have_members(config: Any) -> None:
    """Each policy that has a model lives in one pool, and no pool is empty."""
    known, pools = hosted_policies(config), config.resources.pools
    for name, pool in pools.items():
        key = f"resources.pools.{name}"
        for policy in pool.policies:
            if has_endpoint(config, policy):
                raise ConfigError(
                    f"{key}.policies={list(pool.policies)}: a server elsewhere answers for {policy!r} (policies.{policy}.endpoint), "
                    "which takes no rank; expected policies with a model; remove it from the list"
                )
            if policy not in known:
                raise ConfigError(
                    f"{key}.policies={list(pool.policies)}: no agent acts with {policy!r}; expected some of {', '.join(known)}."
                    f"{did_you_mean(policy, known)}"
                )
        must_be_once(key, "policies", pool.policies, {n: other.policies for n, other in pools.items() if n != name})
        must_be_once(key, "critics", pool.critics, {n: other.critics for n, other in pools.items() if n != name})
        named = [policy for policy in known if pool_of(config, policy) == name]
        if not named and not pool.critics and config.resources.critic_pool != name:
            raise ConfigError(
                f"{key}: it has no members; list some of {', '.join(known)} in {key}.policies, or a critic in {key}.critics, or "
                "leave it out"
            )


def must_be_once(key: str, kind: str, members: Sequence[str], elsewhere: Mapping[str, Sequence[str]]) -> None:
    others = {member: name for name, theirs in elsewhere.items() for member in theirs}
    for member in members:
        if member in others or list(members).count(member) > 1:
            where = f"resources.pools.{others[member]}.{kind}" if member in others else "the same list"
            raise ConfigError(f"{key}.{kind}={list(members)}: {member!r} is in {where} too; expected it once")


def pools_are_named_once(config: Any) -> None:
    """``policies.<name>.pool`` and ``resources.critic_pool`` say the same as the lists."""
    for name, pool in config.resources.pools.items():
        for policy in pool.policies:
            other = (config.policies.get(policy) or {}).get("pool")
            if other not in (None, name):
                raise ConfigError(
                    f"policies.{policy}.pool={other}: resources.pools.{name}.policies lists it; leave one of the two out"
                )
        other = config.resources.critic_pool
        if pool.critics and other not in (None, name):
            raise ConfigError(
                f"resources.critic_pool={other}: resources.pools.{name}.critics={list(pool.critics)} places critics too; leave one "
                "of the two out"
            )


def a_cpu_has_its_engines(config: Any) -> None:
    if config.trainer.device != "cpu":
        return
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.strategy != "fsdp2":
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={actor.strategy} does not run on a CPU; use fsdp2 (hardware=cpu sets it)"
        )
    if rollout.name not in ("hf", "vllm"):
        what = "needs an accelerator" if rollout.name == "sglang" else "is no engine that runs on a CPU"
        raise ConfigError(f"actor_rollout_ref.rollout.name={rollout.name} {what}; use hf (hardware=cpu sets it)")
    if rollout.name == "vllm" and not engine_settings(rollout).get("worker_extension_cls"):
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm needs an accelerator, or settings for a CPU, which hardware=cpu_vllm makes; "
            "use hf (hardware=cpu sets it)"
        )


def one_process_is_one_rank(config: Any) -> None:
    if not config.resources.one_process:
        return
    for keys, size in sizes(config).items():
        if size.ranks != 1:
            raise ConfigError(
                f"resources.one_process=true has one rank, and {keys} ask for {size.ranks}; set both to 1"
            )
    if config.actor_rollout_ref.rollout.name != "hf":
        raise ConfigError(
            f"resources.one_process=true serves with the hf rollout, not with actor_rollout_ref.rollout.name="
            f"{config.actor_rollout_ref.rollout.name}; use hf"
        )


def hf_serves_whole_models(config: Any) -> None:
    own = config.actor_rollout_ref
    alone = own.model.lora_rank and not shares_base(config)
    if own.rollout.name == "hf" and alone and not own.model.lora.merge:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={own.model.lora_rank}: rollout.name=hf serves whole models, and is sent "
            "adapters alone; set actor_rollout_ref.model.lora.merge=true, lora_rank=0, or sharing=lora, which serves adapters"
        )


def one_process_has_no_workers(config: Any) -> None:
    if config.resources.one_process and config.controller.num_workers:
        raise ConfigError(
            f"controller.num_workers={config.controller.num_workers}: with resources.one_process=true the driver plays the "
            "episodes itself; set it to 0, or resources.one_process=false"
        )


def cpu_ranks_are_limited(config: Any) -> None:
    for keys, size in sizes(config).items():
        if config.trainer.device == "cpu" and size.ranks > CPU_RANKS:
            raise ConfigError(
                f"{keys}: every rank is a process, and on CPUs a policy takes at most {CPU_RANKS}; use fewer"
            )


def sizes(config: Any) -> dict[str, PoolSize]:
    """Sizes of pools, by the keys and values that decide them."""
    run = f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"
    found = {run: PoolSize(config.trainer.n_gpus_per_node, config.trainer.nnodes)}
    for name in config.resources.pools:
        size, key = size_of(config, name), f"resources.pools.{name}"
        found[f"{key}.nodes={size.nodes} x {key}.gpus={size.gpus}"] = size
    return found


CPU_RANKS = 64


def collectives_end_before_calls(config: Any) -> None:
    """The shorter deadline names the rank that is missing."""
    resources = config.resources
    gloo = config.trainer.device == "cpu" and any(size.ranks > 1 for size in sizes(config).values())
    shortest = min(deadline_of(resources, phase) for phase in Phase if phase is not Phase.request)
    if gloo and resources.process_group_timeout_s >= shortest.seconds:
        raise ConfigError(
            f"resources.process_group_timeout_s={resources.process_group_timeout_s:g}: must be below {shortest.key}="
            f"{shortest.seconds:g}, which would end the call before a missing rank is noticed; lower the former, or raise the latter"
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


OF_ALL_POLICIES = (
    pools_have_members,
    pools_are_named_once,
    ranks_divide_among_servers,
    digests_are_of_hf,
)
"""Rules that iterate over the policies themselves."""

RULES = (
    *OF_ALL_POLICIES,
    a_cpu_has_its_engines,
    one_process_is_one_rank,
    hf_serves_whole_models,
    one_process_has_no_workers,
    cpu_ranks_are_limited,
    collectives_end_before_calls,
)
