"""Which policy an agent acts with. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.config.policies import policies_by_agent
from marl.types import AgentId, PolicyName


class PolicyMap:
    """(agent, round) -> policy."""

    def __init__(self, agents: Mapping[AgentId, Any]) -> None:
        self._policies = policies_by_agent(agents)

    def policy(self, agent: AgentId, round: int) -> PolicyName:
        policies = self._policies[agent]
        return policies[min(round, len(policies)) - 1]

    def label(self, agent: AgentId, policy: PolicyName) -> str:
        """Under which name a policy's numbers stand: its agent's, and its own beside it where the agent has several."""
        return agent if len(set(self._policies[agent])) == 1 else f"{agent}/{policy}"

    def agents(self, policy: PolicyName) -> list[AgentId]:
        """The agents that act with it in any round."""
        return [agent for agent, policies in self._policies.items() if policy in policies]
