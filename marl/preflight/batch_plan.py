"""Batch arithmetic of a step. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marl.config.endpoints import hosted_policies
from marl.config.placement import ranks_of
from marl.config.policies import (
    longest_row,
    own_settings,
    policies_by_agent,
    ranks_per_server,
)


@dataclass(frozen=True)
class PolicyBatch:
    """A policy's share of a step."""

    policy: str
    agents: tuple[str, ...]
    rows: int
    mini_batches: int
    rows_per_mini_batch: int
    tokens: int
    """Upper bound of a micro-batch."""
    updates: int
    ranks: int
    servers: int
    turns: int = 0
    """Turns that its servers answer at most, trained or not."""


@dataclass(frozen=True)
class Batch:
    """A step's arithmetic: tasks x samples = episodes, x turns of every agent."""

    tasks: int
    samples: int
    turns_by_agent: Mapping[str, int]
    policies: tuple[PolicyBatch, ...]

    @property
    def episodes(self) -> int:
        return self.tasks * self.samples

    @property
    def turns(self) -> int:
        return self.episodes * sum(self.turns_by_agent.values())


def batch_of(config: Any, turns_by_agent: Mapping[str, int]) -> Batch:
    """The arithmetic of a resolved configuration, whose runner lets every agent speak so often at most."""
    policies = tuple(policy_batch(config, name, turns_by_agent) for name in hosted_policies(config))
    return Batch(config.data.train_batch_size, config.actor_rollout_ref.rollout.n, turns_by_agent, policies)


def trained_turns(config: Any, policy: str, turns_by_agent: Mapping[str, int]) -> int:
    """Maximum number of turns per episode that train a policy."""
    taught, count = config.learner.get("train_rounds"), 0
    for agent, policies in policies_by_agent(config.agents).items():
        if config.agents[agent].trainable:
            rounds = range(1, turns_by_agent[agent] + 1)
            own = sum(policies[min(r, len(policies)) - 1] == policy for r in rounds)
            count += own if taught is None else min(own, len(taught))
    return count


def answered_turns(config: Any, policy: str, turns_by_agent: Mapping[str, int]) -> int:
    """Maximum number of turns per episode in which agents act with a policy."""
    return sum(
        policies[min(r, len(policies)) - 1] == policy
        for agent, policies in policies_by_agent(config.agents).items()
        for r in range(1, turns_by_agent[agent] + 1)
    )


def policy_batch(config: Any, name: str, turns_by_agent: Mapping[str, int]) -> PolicyBatch:
    own = own_settings(config, name)
    agents = tuple(agent for agent, policies in policies_by_agent(config.agents).items() if name in policies)
    rows = config.data.train_batch_size * own.rollout.n * trained_turns(config, name, turns_by_agent)
    mini_batches = config.data.train_batch_size // own.actor.ppo_mini_batch_size
    ranks = ranks_of(config, name)
    rows_per_rank = max(1, -(-rows // (mini_batches * ranks)))
    return PolicyBatch(
        policy=name,
        agents=agents,
        rows=rows,
        mini_batches=mini_batches,
        rows_per_mini_batch=rows // mini_batches,
        tokens=min(own.actor.ppo_max_token_len_per_gpu, rows_per_rank * longest_row(own.rollout)),
        updates=mini_batches * own.actor.ppo_epochs if rows else 0,
        ranks=ranks,
        servers=ranks // ranks_per_server(own.rollout),
        turns=config.data.train_batch_size * own.rollout.n * answered_turns(config, name, turns_by_agent),
    )
