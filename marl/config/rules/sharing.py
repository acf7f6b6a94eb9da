"""Rules about ``sharing``: what contradicts the mode, and what policies on one base model cannot have apart."""

from collections.abc import Iterator
from typing import Any

from marl.config.endpoints import hosted_policies
from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies
from marl.config.placement import pool_of
from marl.config.policies import changes_of, leaves, own_settings, policies_by_agent, within
from marl.config.sharing import Sharing
from marl.utils.registry import did_you_mean

OWN_MODEL_KEYS = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
BASE_ACTOR_KEYS = (
    "strategy", "fsdp_config", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "checkpoint",
    "use_fused_kernels", "ulysses_sequence_parallel_size", "use_remove_padding", "engine",
)  # fmt: skip
SERVERS_OF_ADAPTERS = ("hf", "vllm")
MOST_VLLM_RANK = 512
"""The last of vLLM's ``MaxLoRARanks``."""
OWN_ROLLOUT_KEYS = ("temperature", "top_p", "top_k", "val_kwargs", "do_sample", "multi_turn", "agent")


def sharing_is_known(config: Any) -> None:
    modes = [mode.value for mode in Sharing]
    if config.sharing is not None and config.sharing not in modes:
        raise ConfigError(
            f"sharing={config.sharing}: expected {', '.join(modes)}, or null to share where agents.<name>.policy says so."
            f"{did_you_mean(str(config.sharing), modes)}"
        )


def individual_policies_are_not_shared(config: Any) -> None:
    if config.sharing != Sharing.individual.value:
        return
    owners: dict[str, str] = {}
    for agent, policies in policies_by_agent(config.agents).items():
        for policy in policies:
            if owners.setdefault(policy, agent) != agent:
                raise ConfigError(
                    f"sharing=individual: the agents {owners[policy]} and {agent} both act with the policy {policy!r}; give "
                    f"{agent} another agents.{agent}.policy, or set sharing=groups"
                )


def a_shared_policy_is_one(config: Any) -> None:
    policies = hosted_policies(config)
    if config.sharing == Sharing.shared.value and len(policies) > 1:
        raise ConfigError(
            f"sharing=shared: the agents name the policies {', '.join(policies)}, and all act with one; unset "
            "agents.<name>.policy and agents.<name>.policy_by_round, or set sharing=groups"
        )


def groups_are_named(config: Any) -> None:
    if config.sharing != Sharing.groups.value:
        return
    for name, agent in config.agents.items():
        if agent.policy is None and not agent.policy_by_round:
            raise ConfigError(
                f"sharing=groups: the agent {name} is in none; set agents.{name}.policy to its group's name, or "
                "sharing=individual, under which every agent has a policy of its own"
            )


def adapters_are_served_as_adapters(config: Any) -> None:
    for name in adapter_policies(config):
        adapter_is_served_as_one(own_settings(config, name), within(config, name))


def adapter_is_served_as_one(own: Any, where: str) -> None:
    """``where``: the beginning of an error."""
    model, rollout = own.model, own.rollout
    if rollout.name not in SERVERS_OF_ADAPTERS:
        raise ConfigError(
            f"{where}actor_rollout_ref.rollout.name={rollout.name}: sharing=lora serves several adapters on one base with hf or vllm; "
            "use one of them, or sharing=individual with lora_rank for an adapter and a base for every policy"
        )
    if model.lora.merge:
        raise ConfigError(
            f"{where}actor_rollout_ref.model.lora.merge=true: sharing=lora serves one base with every policy's adapter beside it, and "
            "a merged one would be another base; set it to false, or sharing=individual"
        )


def every_policy_has_an_adapter(config: Any) -> None:
    for name in adapter_policies(config):
        own = own_settings(config, name)
        rank = own.model.lora_rank
        if rank < 1:
            raise ConfigError(
                f"policies.{name}.model.lora_rank={rank}: under sharing=lora a policy is an adapter, of rank 1 or more; leave "
                "it out, or set sharing=individual"
            )
        if own.rollout.name == "vllm" and rank > MOST_VLLM_RANK:
            raise ConfigError(
                f"{within(config, name)}actor_rollout_ref.model.lora_rank={rank}: vLLM serves adapters of rank {MOST_VLLM_RANK} at "
                "most; lower it, or set actor_rollout_ref.rollout.name=hf"
            )


def adapters_fit_one_engine(config: Any) -> None:
    for name in adapter_policies(config):
        strategy = own_settings(config, name).actor.strategy
        if strategy != "fsdp2":
            raise ConfigError(
                f"{within(config, name)}actor_rollout_ref.actor.strategy={strategy}: sharing=lora switches between adapters, which "
                "FSDP1's flat parameters do not allow; use fsdp2"
            )


def policies_of_a_base_agree(config: Any) -> None:
    """Policies of one pool change alike what belongs to the base model, its engine and its server."""
    first: dict[str, str] = {}
    for name in adapter_policies(config):
        other = first.setdefault(pool_of(config, name), name)
        mine, theirs = (dict(base_changes(config, policy)) for policy in (name, other))
        for key in {**theirs, **mine}:
            if mine.get(key) != theirs.get(key):
                owner, value = (name, mine[key]) if key in mine else (other, theirs[key])
                raise ConfigError(
                    f"policies.{owner}.{key}={value}: {other} and {name} are adapters on the one base model of the pool "
                    f"{pool_of(config, name)!r} and share its settings; set it for both, in actor_rollout_ref.{key}, or put "
                    f"one into another pool, resources.pools={{own:{{policies:[{owner}]}}}}"
                )


def base_changes(config: Any, policy: str) -> Iterator[tuple[str, Any]]:
    """A policy's changes that are none of its adapter, its update and its sampling, by dotted key."""
    precision = (config.policies.get(policy) or {}).get("precision")
    if precision is not None:
        yield "precision", precision
    changes = changes_of(config.policies, policy)
    for path in leaves(changes):
        if not is_of_the_adapter(path):
            value = changes
            for key in path:
                value = value[key]
            yield ".".join(path), value


def is_of_the_adapter(path: tuple[str, ...]) -> bool:
    group, *keys = path
    if group == "actor":
        return keys[0] not in BASE_ACTOR_KEYS
    return bool(keys) and keys[0] in {"model": OWN_MODEL_KEYS, "rollout": OWN_ROLLOUT_KEYS}.get(group, ())


OF_ALL_POLICIES = (
    adapters_are_served_as_adapters,
    every_policy_has_an_adapter,
    adapters_fit_one_engine,
    policies_of_a_base_agree,
)
"""Rules that iterate over the policies themselves."""

RULES = (
    sharing_is_known,
    individual_policies_are_not_shared,
    a_shared_policy_is_one,
    groups_are_named,
    *OF_ALL_POLICIES,
)
