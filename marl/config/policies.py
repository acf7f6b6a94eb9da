"""Assignment of policies to agents, of weights to policies (``sharing``), and each policy's own settings. Pure."""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from marl.config.precision import settings_of

OURS = ("endpoint", "precision", "thinking")
"""Keys of a policy that are none of ``actor_rollout_ref``."""


def policies_by_agent(agents: Mapping[str, Any]) -> dict[str, list[str]]:
    """Each agent's policies of rounds 1, 2, …; the last one is that of all later rounds. An agent that names none has one
    of its own, of its name."""
    return {name: list(agent.policy_by_round) or [agent.policy or name] for name, agent in agents.items()}


def all_policies(agents: Mapping[str, Any]) -> list[str]:
    """All policies, in the order of the agents."""
    return list(dict.fromkeys(policy for policies in policies_by_agent(agents).values() for policy in policies))


def changes_of(policies: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Overrides of ``actor_rollout_ref`` in ``policies.<name>``: all its keys but those in ``OURS``."""
    return {key: value for key, value in (policies.get(name) or {}).items() if key not in OURS}


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the values in nested groups; an empty group counts as a value."""
    for key, value in tree.items():
        if hasattr(value, "items") and value:
            yield from leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key))


def thinking_of(config: Any, name: str) -> Any:
    """A policy's thinking setting: ``policies.<name>.thinking`` if set, else ``controller.thinking``."""
    return (config.policies.get(name) or {}).get("thinking", config.controller.thinking)


def own_settings(config: Any, name: str) -> Any:
    """``actor_rollout_ref`` as one policy has it, to be read: its keys are checked, and it may add to open dicts
    (``override_config``). A policy without changes has the configuration's own node: a copy takes 50 ms."""
    precision = settings_of((config.policies.get(name) or {}).get("precision"))
    own = changes_of(config.policies, name)
    changes = [part for part in (precision, following(config.actor_rollout_ref, own), own) if part]
    if not changes:
        return config.actor_rollout_ref
    shared = OmegaConf.create(config.actor_rollout_ref)
    OmegaConf.set_struct(shared, False)
    shared.merge_with(*changes)
    return shared


FOLLOWERS = {
    "actor.ppo_max_token_len_per_gpu": ("rollout.log_prob_max_token_len_per_gpu", "ref.log_prob_max_token_len_per_gpu"),
    "actor.ulysses_sequence_parallel_size": ("ref.ulysses_sequence_parallel_size",),
    "actor.fsdp_config.ulysses_sequence_parallel_size": ("ref.fsdp_config.ulysses_sequence_parallel_size",),
    "actor.clip_ratio": ("actor.clip_ratio_low", "actor.clip_ratio_high"),
}
"""Keys by the key that they follow unless they are set: those of the passes without gradients follow the update's."""


def following(common: Any, changes: Mapping[str, Any]) -> Any:
    """The followers of what a policy changes, where the common ones are equal: these follow by an interpolation, which reads the
    common keys alone."""
    own = OmegaConf.create({})
    for key, followers in FOLLOWERS.items():
        value = value_at(changes, key)
        for follower in followers if value is not None else ():
            if value_at(common, follower) == value_at(common, key):
                OmegaConf.update(own, follower, value)
    return own


def value_at(tree: Any, key: str) -> Any:
    """A value by its dotted key; None where a group is missing."""
    for part in key.split("."):
        tree = tree.get(part) if hasattr(tree, "get") else None
    return tree


def loops_of(config: Any, policy: str) -> dict[str, str]:
    """The agent loops by which agents of a policy act, by agent."""
    agents = {
        name: config.agents[name].agent_loop for name, own in policies_by_agent(config.agents).items() if policy in own
    }
    return {name: loop for name, loop in agents.items() if loop is not None}


def trained_policies(agents: Mapping[str, Any]) -> list[str]:
    """The policies of the agents that are trained, in their order."""
    return all_policies({name: agent for name, agent in agents.items() if agent.trainable})


def reads_reference(config: Any, actor: Any) -> bool:
    """True if a policy has a KL penalty against a reference, in its loss or in its reward, or a method that compares with one."""
    return bool(config.algorithm.use_kl_in_reward or actor.use_kl_loss or OmegaConf.select(config, "method.reference"))


def holds_reference(config: Any, own: Any) -> bool:
    """True if a policy's workers hold a reference model; with LoRA it is the policy without its adapters."""
    return reads_reference(config, own.actor) and not own.model.lora_rank


def sequence_parallel(actor: Any) -> int:
    """Number of ranks that split a policy's sequences; verl's older key overrides the newer one where set."""
    older = actor.ulysses_sequence_parallel_size
    return int(older if older > 1 else actor.fsdp_config.ulysses_sequence_parallel_size)


def critic_tokens(critic: Any) -> int:
    """Tokens of a critic's micro-batch, and so of its longest row, over all ranks that split a sequence."""
    return int(critic.ppo_max_token_len_per_gpu * critic.fsdp.ulysses_sequence_parallel_size)


def within(config: Any, policy: str) -> str:
    """The beginning of an error about a policy with settings of its own."""
    return f"policies.{policy}: " if config.policies.get(policy) else ""


def longest_row(rollout: Any) -> int:
    """Tokens of the longest prompt plus the longest answer."""
    return rollout.prompt_length + rollout.response_length


def ranks_per_server(rollout: Any) -> int:
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size


def endpoint_node(config: Any, policy: str) -> Any:
    """A policy's own ``endpoint`` group as it is written, or None."""
    own = config.policies.get(policy)
    return own.get("endpoint") if isinstance(own, Mapping | DictConfig) else None  # a rule refuses what is no group


def has_endpoint(config: Any, policy: str) -> bool:
    return endpoint_node(config, policy) is not None


def endpoint_policies(config: Any) -> list[str]:
    """Policies that a server elsewhere answers for, in the order of the agents."""
    return [name for name in all_policies(config.agents) if has_endpoint(config, name)]


def hosted_policies(config: Any) -> list[str]:
    """Policies whose models this run loads: all but those with an endpoint."""
    return [name for name in all_policies(config.agents) if not has_endpoint(config, name)]


ONE_POLICY = "team"
"""Name of the policy of all agents where none of them names it."""
ADAPTER_RANK = 16
"""``lora_rank`` of ``sharing=lora`` where the configuration leaves verl's 0, no adapter."""


class Sharing(Enum):
    """``sharing``: which agents share weights. null leaves it to ``agents.<name>.policy`` alone."""

    individual = "individual"
    """Every agent has policies of its own."""
    shared = "shared"
    """All agents act with one policy."""
    groups = "groups"
    """Every agent names its policy; those that name the same one are a group."""
    lora = "lora"
    """Policies as under null; each is an adapter on a base model that all policies of a pool share."""

    @classmethod
    def of(cls, config: Any) -> "Sharing | None":
        """Raises ValueError for an unknown mode."""
        return None if config.sharing is None else cls(config.sharing)


def shares_base(config: Any) -> bool:
    """True if policies are adapters on one base model."""
    return bool(config.sharing == Sharing.lora.value)


def apply_sharing(config: Any) -> None:
    """Write into the configuration what ``sharing`` leaves open, so that everything after it reads agents and models alone."""
    if config.sharing == Sharing.shared.value:
        name_one_policy(config)
    elif shares_base(config) and not config.actor_rollout_ref.model.lora_rank:
        config.actor_rollout_ref.model.lora_rank = ADAPTER_RANK


def name_one_policy(config: Any) -> None:
    """Agents that name no policy act with the one that others name, or with ``ONE_POLICY``; those of endpoints keep theirs."""
    policies = policies_by_agent(config.agents)
    sharing = [
        agent for name, agent in config.agents.items() if not any(has_endpoint(config, p) for p in policies[name])
    ]
    named = [agent.policy for agent in sharing if agent.policy is not None]
    for agent in sharing:
        if agent.policy is None and not agent.policy_by_round:
            with open_dict(agent):
                agent.policy = named[0] if named else ONE_POLICY
