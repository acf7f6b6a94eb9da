"""A run, resolved once from its configuration: runner, learner, policies, critics, and the pools that they live in."""

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from marl.batch.critic_spec import CriticSpec
from marl.config.placement import PoolSize, critic_pool, pool_of, size_of
from marl.config.policies import endpoint_policies, hosted_policies, trained_policies
from marl.learners import CREDITS, LEARNERS, Learner
from marl.methods import METHODS, Method
from marl.runners import RUNNERS, Runner
from marl.types import CriticName, PolicyName


@dataclass(frozen=True)
class Setup:
    """Made by :func:`marl.preflight.prepare.prepare`, which checks the configuration first, and read by everything after it."""

    config: DictConfig
    runner: Runner
    learner: Learner
    method: Method
    policies: list[PolicyName]
    """Policies whose models this run loads."""
    endpoints: list[PolicyName]
    """Policies that servers elsewhere answer for."""
    pool_by_policy: Mapping[PolicyName, str]
    pool_by_critic: Mapping[CriticName, str]

    @classmethod
    def of(cls, config: DictConfig) -> "Setup":
        """Build the runner and the learner with its credit. ``credit=auto`` must have been replaced before."""
        runner, learner = make_runner(config), make_learner(config)
        policies, critics = hosted_policies(config), learner.critics
        names = critics.names(trained_policies(config.agents)) if critics else []
        return cls(
            config,
            runner,
            learner,
            make_method(config),
            policies,
            endpoint_policies(config),
            {name: pool_of(config, name) for name in policies},
            {name: critic_pool(config, name) for name in names},
        )

    @property
    def critics(self) -> CriticSpec | None:
        return self.learner.critics

    @property
    def pools(self) -> dict[str, PoolSize]:
        """The pools in which somebody lives, by name."""
        names = dict.fromkeys([*self.pool_by_policy.values(), *self.pool_by_critic.values()])
        return {name: size_of(self.config, name) for name in names}

    @property
    def ranks_by_pool(self) -> dict[str, int]:
        return {name: size.ranks for name, size in self.pools.items()}


def make_runner(config: DictConfig) -> Runner:
    return RUNNERS.build(config.runner)


def make_method(config: DictConfig) -> Method:
    return METHODS.build(config.method)


def make_learner(config: DictConfig) -> Learner:
    return LEARNERS.build(config.learner, credit=CREDITS.build(config.credit))
