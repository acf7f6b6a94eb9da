"""A run, resolved once from its configuration: runner, learner, policies, critics, and the pools that they live in."""

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from marl.batch.critic_spec import CriticSpec
from marl.config.policies import all_policies, colocated, pool_of, ranks_per_pool, trained_policies
from marl.learners import CREDITS, LEARNERS, Learner
from marl.runners import RUNNERS, Runner
from marl.types import CriticName, PolicyName


@dataclass(frozen=True)
class Setup:
    """Made by :func:`marl.preflight.prepare.prepare`, which checks the configuration first, and read by everything after it."""

    config: DictConfig
    runner: Runner
    learner: Learner
    policies: list[PolicyName]
    pool_by_policy: Mapping[PolicyName, str]
    pool_by_critic: Mapping[CriticName, str]

    @classmethod
    def of(cls, config: DictConfig) -> "Setup":
        """Build the runner and the learner with its credit. ``credit=auto`` must have been replaced before."""
        runner, learner = make_runner(config), make_learner(config)
        policies, critics = all_policies(config.agents), learner.critics
        names = critics.names(trained_policies(config.agents)) if critics else []
        return cls(
            config,
            runner,
            learner,
            policies,
            {name: pool_of(config, name) for name in policies},
            {name: critic_pool(config, name) for name in names},
        )

    @property
    def critics(self) -> CriticSpec | None:
        return self.learner.critics

    @property
    def ranks_by_pool(self) -> dict[str, int]:
        pools = [*self.pool_by_policy.values(), *self.pool_by_critic.values()]
        return dict.fromkeys(pools, ranks_per_pool(self.config.trainer))


def make_runner(config: DictConfig) -> Runner:
    return RUNNERS.build(config.runner)


def make_learner(config: DictConfig) -> Learner:
    return LEARNERS.build(config.learner, credit=CREDITS.build(config.credit))


def critic_pool(config: DictConfig, critic: CriticName) -> str:
    """Beside the policies where they are colocated; else a pool of its own."""
    named = config.resources.critic_pool
    return named or ("shared" if colocated(config) else f"{critic}_critic")
