"""Who acts with which policy, by default. Pure."""

from collections.abc import Mapping
from typing import Any


def policy_by_agent(agents: Mapping[str, Any]) -> dict[str, str]:
    """An agent without a ``policy`` has one of its own, of its name."""
    return {name: agent.policy or name for name, agent in agents.items()}
