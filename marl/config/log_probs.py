"""Policies whose servers give the log-probs that their trainer would compute. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from marl.config.policies import loops_of, policies_by_agent
from marl.config.precision import compute_dtype

Sampling = Callable[[str, str, bool], Mapping[str, Any]]
"""Sampling parameters of an agent with a policy; True for those of validation."""


def servers_are_comparable(config: Any, policy: str, own: Any, sampling: Sampling) -> bool:
    """True if a policy's servers compute log-probs as its trainer does: of the same distribution, in the same precision.

    Rollout correction weighs the difference of the two, and an agent loop may sample by parameters of its own.
    """
    correction = config.algorithm.rollout_correction
    return (
        own.rollout.name == "hf"
        and own.rollout.dtype == compute_dtype(own.actor.fsdp_config)
        and not (correction.rollout_is or correction.rollout_rs)
        and not loops_of(config, policy)
        and all(samples_all_tokens(sampling(agent, policy, False)) for agent in trained_agents(config.agents, policy))
    )


def samples_all_tokens(sampling: Mapping[str, Any]) -> bool:
    """True if every token may be drawn. A server's log-probs are of the distribution that it draws from, a trainer's of the
    whole one at the agent's temperature."""
    return sampling["temperature"] > 0 and sampling["top_p"] >= 1 and sampling["top_k"] <= 0


def trained_agents(agents: Mapping[str, Any], policy: str) -> list[str]:
    """The trained agents that act with a policy."""
    return [name for name, own in policies_by_agent(agents).items() if policy in own and agents[name].trainable]
