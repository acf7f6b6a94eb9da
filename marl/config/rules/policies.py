"""Rules about policies: what each may change, and names."""

from typing import Any

from marl.config.bounds import must_be_a_group
from marl.config.errors import ConfigError
from marl.config.policies import OURS, all_policies, changes_of, leaves, own_settings, policies_by_agent
from marl.utils.registry import did_you_mean


def policies_change_groups(config: Any) -> None:
    for name, changes in config.policies.items():
        for key, value in ({f"policies.{name}": changes} | nested(f"policies.{name}", changes)).items():
            if value is not None:
                must_be_a_group(key, value)
        for path in leaves(changes_of(config.policies, name)):
            known, own = config.actor_rollout_ref, changes
            for key in path:
                known, own = known.get(key) if hasattr(known, "keys") else None, own[key]
            if own is not None and hasattr(known, "keys"):
                must_be_a_group(f"policies.{name}.{'.'.join(path)}", own)


def nested(name: str, changes: Any) -> dict[str, Any]:
    """A policy's own groups of ``actor_rollout_ref``."""
    if not hasattr(changes, "items"):
        return {}
    return {f"{name}.{key}": value for key, value in changes.items() if key in ("actor", "rollout", "model", "ref")}


def rollout_n_is_global(config: Any) -> None:
    for name, changes in config.policies.items():
        if "n" in ((changes or {}).get("rollout") or {}):
            raise ConfigError(
                f"policies.{name}.rollout.n={changes.rollout.n}: all agents play the same episodes; set actor_rollout_ref.rollout.n"
            )


def policies_are_acted_with(config: Any) -> None:
    known = all_policies(config.agents)
    for name in config.policies:
        if name not in known:
            raise ConfigError(
                f"policies.{name}: no agent acts with it; expected one of {', '.join(known)}.{did_you_mean(name, known)}"
            )


def policies_of_rounds_take_turns(config: Any) -> None:
    for name, agent in config.agents.items():
        rounds = list(agent.policy_by_round)
        if rounds and agent.policy is not None:
            raise ConfigError(
                f"agents.{name}.policy={agent.policy} and agents.{name}.policy_by_round={rounds} both name its policy; unset one"
            )
        if rounds and agent.temperature is None:
            heat = {
                policy: own_settings(config, policy).rollout.temperature
                for policy in policies_by_agent(config.agents)[name]
            }
            if len(set(heat.values())) > 1:
                raise ConfigError(
                    f"agents.{name}.policy_by_round={rounds}: its policies sample at the temperatures {heat}, and an agent has "
                    f"one; set agents.{name}.temperature"
                )


def policies_change_known_keys(config: Any) -> None:
    for name in config.policies:
        for path in leaves(changes_of(config.policies, name)):
            node, walked = config.actor_rollout_ref, f"policies.{name}"
            for key in path:
                if not hasattr(node, "keys") or key not in node:
                    known = [str(k) for k in node] if hasattr(node, "keys") else []
                    raise ConfigError(
                        f"unknown key '{walked}.{key}': a policy's keys are those of actor_rollout_ref, and {', '.join(map(repr, OURS))}."
                        f"{did_you_mean(key, [*known, *OURS])}"
                    )
                node, walked = node[key], f"{walked}.{key}"
                if hasattr(node, "keys") and not node:
                    break  # an open dict, such as override_config


def names_are_free_for_critics(config: Any) -> None:
    if "central" in all_policies(config.agents):
        raise ConfigError(
            "a policy may not be called 'central', which is the central critic's name; rename the agent or its agents.<name>.policy"
        )
    for name in all_policies(config.agents):
        if name.endswith("_critic"):
            raise ConfigError(
                f"a policy may not be called {name!r}: names that end in _critic are those of critics' workers; rename the "
                "agent or its agents.<name>.policy"
            )


OF_ALL_POLICIES = (policies_of_rounds_take_turns,)
"""Rules that iterate over the policies themselves."""

RULES = (
    rollout_n_is_global,
    policies_are_acted_with,
    policies_of_rounds_take_turns,
    policies_change_known_keys,
    names_are_free_for_critics,
)
