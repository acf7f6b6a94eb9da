"""Checks that runner, learner and credit are compatible: pure, without a model or a worker."""

import logging

from omegaconf import DictConfig, OmegaConf

from marl.config.errors import ConfigError
from marl.config.kinds import answers_only
from marl.config.policies import policies_by_agent
from marl.config.rules.training import kl_in_any_loss
from marl.config.schema import LogProbSource
from marl.learners import CREDITS, LEARNERS
from marl.learners.credit_schemes import INCENTIVES, TeamOf
from marl.preflight.methods import check_method
from marl.run_setup import Setup, make_runner
from marl.utils.class_facts import check_class
from marl.utils.registry import did_you_mean

logger = logging.getLogger(__name__)


def choose_credit(config: DictConfig) -> None:
    """Resolves ``credit=auto``: the runner's choice if the learner accepts it, else the learner's."""
    if config.credit.name == "auto":
        learner, wanted = LEARNERS.get(config.learner.name), make_runner(config).default_credit
        chosen = wanted if wanted and wanted in (learner.credits or [wanted]) else learner.default_credit
        incentives = {str(key): value for key, value in config.credit.items() if key != "name"}
        config.credit = OmegaConf.structured(CREDITS.get(chosen).Config(name=chosen, **incentives))


def check_facts(setup: Setup) -> None:
    """Raise ConfigError where a runner's or learner's class does not support what the configuration asks for."""
    try:
        for own in (setup.runner, setup.learner, setup.learner.credit):
            check_class(type(own))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_runner(setup)
    check_method(setup)
    if setup.method.learns:
        check_learner(setup)
        check_credit(setup)
        check_critics(setup)
        check_log_probs(setup)
        warn_of_early_ends(setup)
        warn_of_two_penalties(setup.config)
    check_pools(setup)


def check_runner(setup: Setup) -> None:
    config, runner = setup.config, setup.runner
    try:
        runner.check(list(config.agents))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rounds, last = config.learner.train_rounds, runner.last_round(list(config.agents))
    if rounds is not None and (not rounds or min(rounds) < 1 or (last is not None and max(rounds) > last)):
        ends = "" if last is None else f", and with these agents runner={config.runner.name} ends in round {last}"
        raise ConfigError(
            f"learner.train_rounds={list(rounds)}: rounds are counted from 1{ends}; use some of them, or null for all"
        )


def check_learner(setup: Setup) -> None:
    config, learner, credit = setup.config, setup.learner, setup.learner.credit
    if learner.credits and config.credit.name not in learner.credits:
        raise ConfigError(
            f"credit={config.credit.name}: learner={config.learner.name} is defined for credit={' and '.join(learner.credits)} "
            "alone; use that, or credit=auto"
        )
    try:
        learner.check(policies_by_agent(config.agents))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name, agent in config.agents.items() if learner.exchange_every else ():
        if not agent.trainable or agent.agent_loop:
            key = "agent_loop" if agent.trainable else "trainable"
            raise ConfigError(
                f"agents.{name}.{key}={agent[key]}: with learner={config.learner.name} agents exchange their policies every "
                f"{learner.exchange_every} steps, and all must be trained and answer in the same way; leave it out"
            )
    compares = setup.runner.compares_alternatives
    alone = config.actor_rollout_ref.rollout.n < 2 and not compares
    if alone and learner.compares_samples and credit.kind != "advantage":
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}: learner={config.learner.name} compares a "
            "task's samples, and a group of one gives no signal; set it to at least 2"
        )
    if learner.joint_actions and compares:
        raise ConfigError(
            f"runner={config.runner.name} compares alternatives of one agent, and they are part of no joint action, on which "
            f"learner={config.learner.name} works; use runner.train=path (tree), another runner, or learner=grpo"
        )
    check_estimators(setup)


def check_estimators(setup: Setup) -> None:
    config = setup.config
    named = {"algorithm.adv_estimator": config.algorithm.adv_estimator}
    if "estimator" in config.learner:
        named["learner.estimator"] = config.learner.estimator
    for key, wanted in named.items():
        if wanted is not None and wanted not in (known := setup.learner.estimators()):
            raise ConfigError(
                f"{key}={wanted}: learner={config.learner.name} knows {', '.join(known) or 'none'}; null is its own. "
                f"'gae' needs learner=ippo, mappo or happo, others learner=grpo.{did_you_mean(str(wanted), known)}"
            )


def check_credit(setup: Setup) -> None:
    config, learner, credit, name = setup.config, setup.learner, setup.learner.credit, setup.config.credit.name
    if credit.votes and not setup.runner.votes:
        raise ConfigError(
            f"credit={name} distributes the score of the team's vote, and runner={config.runner.name} takes no vote; use a runner "
            "with runner.decide, such as debate or voting, or credit=team credit.of=answer"
        )
    check_incentives(setup)
    own = "credit=own, " if not learner.credits or "own" in learner.credits else "another learner than this, "
    if setup.runner.compares_alternatives and credit.kind != "advantage" and not credit.own_scores:
        raise ConfigError(
            f"credit={name}: runner={config.runner.name} compares every trained turn with its alternatives by their own "
            f"scores, and the credit would have no effect; use {own}runner.train=path (tree), or another runner"
        )
    if credit.compares_samples and config.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}: credit={name} compares a task's samples, and a "
            "single one gives no signal; set it to at least 2"
        )
    check_overlong(setup)
    if credit.kind != "advantage":
        return
    if learner.critics:
        raise ConfigError(
            f"credit={name} gives advantages, and learner={config.learner.name} would fit a critic that is "
            "never used; use learner=grpo"
        )
    if config.algorithm.adv_estimator is not None or config.algorithm.use_kl_in_reward:
        raise ConfigError(
            f"credit={name} gives advantages, which go to the loss as they are: algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} and algorithm.use_kl_in_reward={config.algorithm.use_kl_in_reward} would "
            "have no effect; use null and false, and actor.use_kl_loss for a reference"
        )


def warn_of_early_ends(setup: Setup) -> None:
    """Warn of a credit that gives a team that ends early less than one that repeats its right answers, and of groups in which the
    longer conversation counts more."""
    config, credit = setup.config, setup.learner.credit
    if setup.runner.may_end_early and setup.learner.weighs_turns and credit.kind != "advantage":
        logger.warning(
            "runner=%s may end a conversation early, and learner.group_by=[%s] compares turns of all rounds: a conversation of three "
            "rounds counts three times in their mean, which biases an agent that may end it towards talking on. Set "
            "learner.weight_by=episode, or add round to learner.group_by",
            config.runner.name, ", ".join(str(getattr(key, "name", key)) for key in config.learner.group_by),
        )  # fmt: skip
    # without a gamma, a learner reads a turn's own reward
    summed = credit.kind != "reward" or config.learner.get("gamma")
    if setup.runner.may_end_early and credit.adds_answers and summed and not answers_only(config):
        logger.warning(
            "runner=%s may end a conversation early, and credit=%s adds up the scores of an agent's answers: right answers in "
            "one round earn less than the same answers repeated in three, which discourages ending early. Credit an "
            "outcome once, with credit=team credit.of=final (or of=answer), zero_sum or shapley, or weight it with "
            "credit=influence",
            config.runner.name, config.credit.name,
        )  # fmt: skip


def warn_of_two_penalties(config: DictConfig) -> None:
    if config.algorithm.use_kl_in_reward and kl_in_any_loss(config):
        logger.warning(
            "algorithm.use_kl_in_reward=true and actor.use_kl_loss=true: the KL penalty against the reference counts twice, in the "
            "reward and in the loss; set one of them to false, unless both are meant"
        )


def check_incentives(setup: Setup) -> None:
    """They compare an answer with those beside it, and with those of the round after."""
    config, runner, agents = setup.config, setup.runner, list(setup.config.agents)
    incentives = {key: config.credit[key] for key in INCENTIVES if config.credit[key]}
    if not incentives:
        return
    alone = len(agents) == 1 or runner.in_turn
    if alone or runner.last_round(agents) == 1:
        key, value = next(iter(incentives.items()))
        why = "no two agents answer in the same round" if alone else "nobody answers in a second round"
        raise ConfigError(
            f"credit.{key}={value}: with these agents and runner={config.runner.name} {why}, and incentives, which compare an "
            f"answer with its peers' in the same round and in the next, would have no effect; set credit.{key}=0, or use a runner "
            "such as debate with runner.order=simultaneous and runner.num_rounds=2"
        )


def check_overlong(setup: Setup) -> None:
    """A turn's penalty is subtracted from its own score, which some credits and all incentives do not read."""
    config, credit, scheme = setup.config, setup.config.credit, setup.learner.credit
    buffer = config.judge.overlong_buffer
    if buffer and setup.runner.scores_turns:
        raise ConfigError(
            f"judge.overlong_buffer={buffer}: runner={config.runner.name} gives every turn its score, whatever its "
            "length; set it to 0"
        )
    if buffer and not scheme.reads_turn_scores:
        of = " credit.of=answer" if credit.get("of") is TeamOf.answer else ""
        raise ConfigError(
            f"judge.overlong_buffer={buffer}: credit={credit.name}{of} does not read the score of a single turn, and its "
            "penalty would have no effect; use another credit, such as own, or set it to 0"
        )


def check_pools(setup: Setup) -> None:
    known = list(setup.pool_by_critic)
    for name, pool in setup.config.resources.pools.items():
        unknown = [critic for critic in pool.critics if critic not in known]
        if unknown:
            raise ConfigError(
                f"resources.pools.{name}.critics={list(pool.critics)}: learner={setup.config.learner.name} has no critic "
                f"{unknown[0]!r}; expected {'some of ' + ', '.join(known) if known else 'none'}, leave it out"
            )


def check_critics(setup: Setup) -> None:
    config, critics = setup.config, setup.critics
    if config.critic.enable not in (None, critics is not None):
        raise ConfigError(
            f"critic.enable={config.critic.enable}: the learner decides whether there are critics, and "
            f"learner={config.learner.name} has {critics.kind if critics else 'none'} ones; leave it null"
        )
    if critics:
        critics.check(config)
    warm_up = config.trainer.critic_warmup
    if warm_up and not critics:
        raise ConfigError(
            f"trainer.critic_warmup={warm_up}: learner={config.learner.name} has no critic to warm up, and would train nothing "
            "until then; set it to 0"
        )


def check_log_probs(setup: Setup) -> None:
    config = setup.config
    exact = LEARNERS.get(config.learner.name).needs_exact_log_probs
    bypass = config.algorithm.rollout_correction.bypass_mode
    if exact and (bypass or LogProbSource.of(config) is LogProbSource.server):
        key = "algorithm.rollout_correction.bypass_mode=true" if bypass else "controller.old_log_probs=server"
        raise ConfigError(
            f"{key} with learner={config.learner.name}, which compares log-probs before and after an update: the gap between "
            "server and trainer would count as one; leave controller.old_log_probs=auto and bypass_mode=false"
        )
