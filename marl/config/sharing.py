"""``sharing``: one key for the partition of agents onto policies, and of policies onto models. Pure."""

from enum import Enum
from typing import Any

from omegaconf import open_dict

from marl.config.endpoints import has_endpoint
from marl.config.policies import policies_by_agent

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
