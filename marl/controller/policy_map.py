"""Which policy an agent acts with. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.types import AgentId, PolicyName


class PolicyMap:
    """(agent, round) -> policy. An agent without a ``policy`` has one of its own, of its name."""

    def __init__(self, agents: Mapping[AgentId, Any]) -> None:
        self._policy = {name: agent.policy or name for name, agent in agents.items()}

    def policy(self, agent: AgentId, round: int) -> PolicyName:
        return self._policy[agent]

    @property
    def policies(self) -> list[PolicyName]:
        return list(dict.fromkeys(self._policy.values()))

    def agents(self, policy: PolicyName) -> list[AgentId]:
        return [agent for agent, name in self._policy.items() if name == policy]
