"""Which policy an agent acts with. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.config.policies import policy_by_agent
from marl.types import AgentId, PolicyName


class PolicyMap:
    """(agent, round) -> policy."""

    def __init__(self, agents: Mapping[AgentId, Any]) -> None:
        self._policy = policy_by_agent(agents)

    def policy(self, agent: AgentId, round: int) -> PolicyName:
        return self._policy[agent]

    def agents(self, policy: PolicyName) -> list[AgentId]:
        return [agent for agent, name in self._policy.items() if name == policy]
