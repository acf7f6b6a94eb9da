"""A run resolved once: everything that a checked configuration says of it, for everybody who needs to know."""

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from marl.batch.utility_inputs import SHARED
from marl.config.policies import policy_names, trained_policies
from marl.learners import CREDITS, LEARNERS, Learner
from marl.runners import RUNNERS, Runner
from marl.types import CriticName, PolicyName


@dataclass(frozen=True)
class Setup:
    """Made of a configuration by :func:`marl.preflight.prepare.prepare`, which checks it, or by :meth:`of`."""

    config: DictConfig
    runner: Runner
    learner: Learner
    policies: list[PolicyName]
    pool_by_policy: Mapping[PolicyName, str]
    pool_by_critic: Mapping[CriticName, str]

    @classmethod
    def of(cls, config: DictConfig) -> "Setup":
        """Build the runner, the learner and its credit; ``credit=auto`` has to be chosen by then."""
        runner, learner = make_runner(config), make_learner(config)
        policies, critics = policy_names(config), critic_names(config)
        return cls(
            config,
            runner,
            learner,
            policies,
            {name: pool_of(config, name) for name in policies},
            {name: critic_pool(config, name) for name in critics},
        )

    @property
    def ranks_by_pool(self) -> dict[str, int]:
        trainer = self.config.trainer
        pools = [*self.pool_by_policy.values(), *self.pool_by_critic.values()]
        return dict.fromkeys(pools, trainer.nnodes * trainer.n_gpus_per_node)


def make_runner(config: DictConfig) -> Runner:
    return RUNNERS.build(config.runner)


def make_learner(config: DictConfig) -> Learner:
    return LEARNERS.build(config.learner, credit=CREDITS.build(config.credit))


def pool_of(config: DictConfig, policy: PolicyName) -> str:
    named = (config.policies.get(policy) or {}).get("pool")
    return named or ("shared" if config.resources.placement.name == "colocated" else policy)


def critic_names(config: DictConfig) -> list[CriticName]:
    """A local critic for every policy that is trained, of its name; one central critic, or shared utility, for all."""
    kind = LEARNERS.get(config.learner.name).critic
    if kind == "none":
        return []
    if kind == "utility" and config.learner.share_utilities:
        return [SHARED]
    return ["central"] if kind == "central" else trained_policies(config.agents)


def critic_pool(config: DictConfig, critic: CriticName) -> str:
    """Beside the policies where they are colocated; else a pool of its own."""
    named = config.resources.critic_pool
    return named or ("shared" if config.resources.placement.name == "colocated" else f"{critic}_critic")
