"""Maps agents to the policies that they act with. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from marl.config.policies import policies_by_agent
from marl.config.schema import AgentConfig
from marl.types import AgentId, PolicyName


class PolicyMap:
    """(agent, round) -> policy, which may change from step to step: see :meth:`at`."""

    def __init__(self, agents: Mapping[AgentId, AgentConfig], exchange_every: int = 0, exchanges: int = 0) -> None:
        """``exchanges``: how often every agent has handed its policies on to the agent before it."""
        self.agents_of_all, self.exchange_every = agents, exchange_every
        given = policies_by_agent(agents)
        names = list(given)
        self._policies = {name: given[names[(i + exchanges) % len(names)]] for i, name in enumerate(names)}
        self._exchanged: dict[int, PolicyMap] = {}

    def at(self, step: int) -> PolicyMap:
        """The map of a trainer's step: every ``exchange_every`` steps the agents exchange their policies, in turn.

        Of two agents the entries are swapped, and after two exchanges all is as it was. What belongs to a policy goes
        along: weights, moments, its critic and its KL coefficient.
        """
        if not self.exchange_every:
            return self
        exchanges = (max(step, 1) - 1) // self.exchange_every % len(self._policies)
        if exchanges not in self._exchanged:
            self._exchanged[exchanges] = PolicyMap(self.agents_of_all, exchanges=exchanges)
        return self._exchanged[exchanges]

    def policy(self, agent: AgentId, round: int) -> PolicyName:
        policies = self._policies[agent]
        return policies[min(round, len(policies)) - 1]

    def label(self, agent: AgentId, policy: PolicyName) -> str:
        """Label of a policy's metrics: its agent's name, and its own beside it where the agent has several policies."""
        return agent if len(set(self._policies[agent])) == 1 else f"{agent}/{policy}"

    def agents(self, policy: PolicyName) -> list[AgentId]:
        """The agents that act with it in any round."""
        return [agent for agent, policies in self._policies.items() if policy in policies]

    def labels(self, agents: Collection[AgentId]) -> dict[PolicyName, list[str]]:
        """Labels of every policy's metrics, one for each of these agents that acts with it."""
        names = {name: None for policies in self._policies.values() for name in policies}
        return {name: [self.label(agent, name) for agent in self.agents(name) if agent in agents] for name in names}
