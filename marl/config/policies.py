"""Who acts with which policy, and how a policy differs from the others. Pure."""

from collections.abc import Mapping
from typing import Any


def policy_by_agent(agents: Mapping[str, Any]) -> dict[str, str]:
    """An agent without a ``policy`` has one of its own, of its name."""
    return {name: agent.policy or name for name, agent in agents.items()}


def changes_of(policies: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What ``policies.<name>`` changes in ``actor_rollout_ref``: all it says but its pool."""
    return {key: value for key, value in (policies.get(name) or {}).items() if key != "pool"}
