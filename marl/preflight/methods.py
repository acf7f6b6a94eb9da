"""Checks that ``method`` fits the rest of a configuration."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.config.policies import own_settings, trained_policies, within
from marl.config.precision import dtype_name
from marl.config.rules.training import kl_in_any_loss
from marl.config.sources import Source
from marl.data.rows import DATA_SUFFIXES
from marl.methods.choice import CompareBy
from marl.methods.losses import PreferenceLoss
from marl.methods.sft import SFT
from marl.methods.teachers import Target, must_speak
from marl.run_setup import Setup
from marl.utils.near import did_you_mean


def check_method(setup: Setup) -> None:
    """Raise ConfigError where a method cannot be combined with the rest."""
    config, method = setup.config, setup.method
    if Source.of(config) not in method.sources:
        known = " or ".join(source.value for source in method.sources)
        raise ConfigError(
            f"method.source={config.method.source.value}: method={config.method.name} takes its examples from {known}; leave it out, "
            "or use method=sft or method=dpo"
        )
    if method.imitates is not None:
        check_hybrid(setup)
    if not method.learns:
        for problem in problems_without_learner(setup):
            raise ConfigError(problem)
    for problem in (*problems_of_preferences(setup), *problems_of_lessons(setup)):
        raise ConfigError(problem)


def problems_without_learner(setup: Setup) -> Iterator[str]:
    """Settings of the learner's that have no effect on a method's updates."""
    config, name = setup.config, setup.config.method.name
    actor, tasks = config.actor_rollout_ref.actor, config.data.train_batch_size
    if setup.learner.critics:
        yield (
            f"learner={config.learner.name} with method={name}: its critics would never be used; leave learner=grpo, which is not "
            "used, or set method=rl"
        )
    if config.algorithm.use_kl_in_reward or kl_in_any_loss(config):
        yield (
            f"actor_rollout_ref.actor.use_kl_loss or algorithm.use_kl_in_reward with method={name}: its loss has no KL penalty; set "
            "them to false"
        )
    if actor.ppo_mini_batch_size != tasks:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} with method={name}, which updates once on each "
            f"batch; leave it out, and set data.train_batch_size (now {tasks})"
        )
    if actor.ppo_epochs != 1:
        yield (
            f"actor_rollout_ref.actor.ppo_epochs={actor.ppo_epochs} with method={name}; set method.epochs={actor.ppo_epochs} instead"
        )
    buffer = config.judge.overlong_buffer
    if buffer and not setup.method.reads_turn_scores:
        yield (
            f"judge.overlong_buffer={buffer} with method={name}, which does not read the score of a single turn: the penalty "
            "would have no effect; set it to 0"
        )
    if config.baseline:
        yield f"baseline={config.baseline} with method={name}: baselines are trained by the learner; set baseline=[], or method=rl"
    if setup.learner.exchange_every:
        yield f"learner={config.learner.name} with method={name}: its agents exchange policies; leave learner=grpo"


def problems_of_preferences(setup: Setup) -> Iterator[str]:
    config, method = setup.config, setup.method
    options, samples = config.method, config.actor_rollout_ref.rollout.n
    if options.get("label_smoothing") and options.loss is not PreferenceLoss.sigmoid:
        yield (
            f"method.label_smoothing={options.label_smoothing:g} with method.loss={options.loss.value}, which has none; set it to 0, "
            "or method.loss=sigmoid"
        )
    if method.joins_agents and options.compare_by is CompareBy.own:
        yield (
            f"method.compare_by=own with method={options.name}, which prefers what all agents said together: the team's answer is "
            "scored; leave it out, or use method=dpo"
        )
    if (
        not method.learns
        and not method.offline
        and not method.plays_reference
        and "compare_by" in options
        and samples < 2
    ):
        yield (
            f"actor_rollout_ref.rollout.n={samples}: method={options.name} compares a task's samples, and one has no contrast; set it "
            "to at least 2"
        )
    if not method.plays_reference:
        return
    adapted = [name for name in trained_policies(config.agents) if own_settings(config, name).model.lora_rank]
    if adapted:
        yield (
            f"model.lora_rank of policy {adapted[0]!r} with method={options.name}: the opponent is a reference with weights of its "
            "own, and that of an adapter is its base, which is never renewed; set lora_rank=0 and sharing=individual"
        )
    yield from problems_of_dtypes(setup)
    if not options.reference:
        yield f"method.reference=false: the opponent of method={options.name} is the reference; leave it true"


def problems_of_lessons(setup: Setup) -> Iterator[str]:
    """Settings of whom and what an agent imitates."""
    options = setup.method.config
    if not isinstance(options, SFT.Config):
        return
    from_agent, source = options.from_agent, setup.method.imitates or options.source
    given = [] if from_agent is None else [f"method.from_agent={from_agent}"]
    given += [] if options.target is Target.turns else [f"method.target={options.target.value}"]
    given += [f"method.peers_weight={options.peers_weight:g}"] if options.peers_weight else []
    if given and source is Source.rows:
        key = "imitates" if setup.method.learns else "source"
        yield (
            f"{given[0]} with method.{key}=rows: it applies to episodes; rows have no turns; set "
            f"method.{key}=episodes, or leave it out"
        )
    if from_agent is not None and options.target is not Target.turns:
        yield f"{given[0]} with {given[1]}: the team's answer is nobody's turn; leave one of them out"
    runner = setup.config.runner
    plans = options.peers_weight and "foresee" in runner and runner.foresee
    if plans and source is not Source.play and runner.foresee_request != options.peers_request:
        yield (
            f"runner.foresee_request={runner.foresee_request!r} with method.peers_request={options.peers_request!r}: the model would "
            "be trained on one question and asked another; set both to the same text"
        )
    yield from problems_of_teachers(from_agent, setup.config.agents, source)


def problems_of_teachers(from_agent: Any, agents: Mapping[str, Any], source: Source) -> Iterator[str]:
    texts = [from_agent] if isinstance(from_agent, str) else []
    if isinstance(from_agent, Mapping):
        texts = [*from_agent, *from_agent.values()]
    if from_agent is not None and not (texts and all(isinstance(text, str) and text for text in texts)):
        yield (
            f"method.from_agent={from_agent!r}: expected an agent's name, or a map of names such as {{carol: alice}}, by which carol "
            "learns the turns of alice"
        )
        return
    students = [name for name, agent in agents.items() if agent.trainable]
    for name in from_agent if isinstance(from_agent, Mapping) else []:
        if name not in students:
            yield (
                f"method.from_agent={from_agent}: {name!r} is no trained agent of this run; expected one of {', '.join(students)}."
                f"{did_you_mean(name, students)}"
            )
    if source is Source.play:
        yield from problem_of(lambda: must_speak(from_agent, list(agents), "this run"))


def problem_of(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def problems_of_dtypes(setup: Setup) -> Iterator[str]:
    """References in other dtypes than their policies: weights that they exchange would be rounded."""
    for name in trained_policies(setup.config.agents):
        own = own_settings(setup.config, name)
        kept, trained = (dtype_name(part.fsdp_config.model_dtype) for part in (own.ref, own.actor))
        if kept != trained:
            yield (
                f"{within(setup.config, name)}ref.fsdp_config.model_dtype={kept} with method={setup.config.method.name}, whose opponent "
                f"exchanges weights with its policy in {trained}: they would be rounded; set it to that of actor.fsdp_config"
            )


def check_hybrid(setup: Setup) -> None:
    config, options = setup.config, setup.config.method
    if options.imitates is Source.play:
        raise ConfigError(
            "method.imitates=play: expected rows or episodes, which are read from method.files; use method=rft"
        )
    if config.trainer.total_training_steps is not None:
        leaves_steps_to_play(options.sft_steps, config.trainer.total_training_steps)
    if config.trainer.critic_warmup:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} with method={options.name}: steps of imitation would use it up, and "
            "train no critic; set it to 0, or imitate in a run of method=sft and begin another from its weights"
        )
    if setup.learner.exchange_every:
        raise ConfigError(
            f"learner={config.learner.name} with method={options.name}: its agents exchange policies, which imitation does not; "
            "imitate in a run of method=sft and begin another from its weights, or set learner.exchange_every=0"
        )
    if not options.files:
        raise ConfigError(f"method.files=[]: method={options.name} imitates them first; name parquet or jsonl files")
    for file in options.files:
        if not Path(file).expanduser().is_file() or Path(file).suffix not in DATA_SUFFIXES:
            raise ConfigError(f"method.files={file}: no such file; expected {', '.join(DATA_SUFFIXES)}")


def leaves_steps_to_play(imitated: int, steps: int) -> None:
    """Raise ConfigError where imitation takes all of a run's steps."""
    if imitated >= steps:
        raise ConfigError(
            f"method.sft_steps={imitated}: the run's {steps} steps (trainer.total_training_steps, or trainer.total_epochs of "
            "data.train_files) leave none to play; lower it, or use method=sft"
        )
