"""Teams play the same tasks: each with its runner, and, where asked for, without one of its agents, and baselines."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl.build import tokenizer_of
from marl.checkpoint import fingerprint, validation_sampling
from marl.cluster.layout import model_config
from marl.config.errors import ConfigError
from marl.controller.controller import Controller
from marl.controller.tasks import validation_tasks
from marl.evaluation.baselines import majority_is_right
from marl.evaluation.source import Source
from marl.evaluation.statistics import accuracy_T, by_task, columns_of, compared, cost_of, mean, numbers_of
from marl.evaluation.team import Team, opened, setup_of
from marl.report import conversation, dump
from marl.runners import RUNNERS
from marl.types import AgentId, Episode, Task
from marl.utils.intervals import wilson
from marl.utils.registry import did_you_mean

BASELINES = ("solo", "vote", "tokens")
Numbers = dict[AgentId, dict[str, Any]]
"""A baseline's numbers by agent."""


@dataclass(frozen=True)
class Asked:
    """Measures and baselines of an evaluation, besides accuracy."""

    samples: int | None = None
    """None: those of the run's validation."""
    measures: Sequence[str] = ()
    baselines: Sequence[str] = ()
    leave_one_out: bool = False


@dataclass
class Result:
    """One team's results."""

    source: Source
    numbers: dict[str, Any]
    right_T: list[float]
    """The share of right samples of every task."""
    validation: str
    """Digest of the tasks."""
    sampling: dict[str, Any]


def evaluate(source: Source, words: Sequence[str], asked: Asked, folder: Path) -> Result:
    """Play the tasks; the episodes are dumped into ``folder``. Raises ConfigError."""
    with opened(source, [*words, *samples_of(asked)]) as team:
        must_vary(team)
        tasks = team.tasks()
        episodes, seconds = played(team, team.controller, tasks)
        dump.write(episodes, team.step, folder, [[columns_of(turn) for turn in e.turns] for e in episodes])
        result = Result(
            source,
            numbers_of(episodes, seconds, asked.measures),
            accuracy_T(episodes),
            fingerprint(tasks),
            validation_sampling(team.setup.config, team.controller.sampling),
        )
        if asked.leave_one_out:
            result.numbers["leave_one_out"] = leave_one_out(team, tasks, result)
        for name in asked.baselines:
            result.numbers[name] = BASELINE[name](team, tasks, episodes, result)
        return result


def must_read_the_same_tasks(sources: Sequence[Source], words: Sequence[str]) -> None:
    """Raise ConfigError, before anything is played, where teams could not be compared."""
    digests = [digest_of(source, words) for source in sources] if len(sources) > 1 else []
    for source, digest in zip(sources, digests, strict=False):
        if digest != digests[0]:
            raise ConfigError(
                f"{sources[0].path} and {source.path} read different tasks from the same files (data.* differs, as "
                "data.prompt_key or data.val_max_samples); name these keys on the command line"
            )


def digest_of(source: Source, words: Sequence[str]) -> str:
    """Digest of the tasks that a source would play."""
    setup = setup_of(source, words)
    return fingerprint(validation_tasks(setup.config, tokenizer_of(model_config(setup.config, setup.policies[0]))))


def samples_of(asked: Asked) -> list[str]:
    """A failed episode is a wrong one, however many there are."""
    n = [] if asked.samples is None else [f"actor_rollout_ref.rollout.val_kwargs.n={asked.samples}"]
    return ["controller.max_error_rate=1.0", *n]


def must_vary(team: Team) -> None:
    """Raise ConfigError where all samples of a task would be the same."""
    validation = team.setup.config.actor_rollout_ref.rollout.val_kwargs
    greedy, samples = not validation.do_sample or not validation.temperature, validation.n
    if greedy and samples > 1:
        raise ConfigError(
            f"n={samples}: the run's validation decodes greedily, and all samples of a task would be the same; add "
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=1, or use n=1"
        )


def played(
    team: Team, controller: Controller, tasks: Sequence[Task], samples: int | None = None, validate: bool = True
) -> tuple[list[Episode], float]:
    """The judged episodes, and the seconds that they took together."""
    started = time.monotonic()
    n = team.setup.config.actor_rollout_ref.rollout.val_kwargs.n if samples is None else samples
    return team.loop.run_until_complete(controller.measure(tasks, n, team.step, validate)), time.monotonic() - started


def leave_one_out(team: Team, tasks: Sequence[Task], result: Result) -> Numbers:
    """The team plays again without each of its agents; a runner that cannot gives the reason."""
    numbers: Numbers = {}
    for agent in team.controller.agents:
        others = [name for name in team.controller.agents if name != agent]
        try:
            team.controller.runner.check(others)
        except ValueError as error:
            numbers[agent] = {"reason": str(error)}
            continue
        episodes, seconds = played(team, with_agents(team.controller, others), tasks)
        numbers[agent] = compared_with(result, accuracy_T(episodes)) | {"cost": cost_of(episodes, seconds)}
    return numbers


def with_agents(controller: Controller, agents: Sequence[AgentId], runner: str | None = None) -> Controller:
    """The same servers for some of the agents, who may play another runner."""
    other = copy.copy(controller)
    other.agents, other.judged = {name: controller.agents[name] for name in agents}, {}
    if runner is not None:
        kind = RUNNERS.get(runner)
        other.runner = kind(kind.Config(name=runner))
    return other


def compared_with(result: Result, right_T: list[float]) -> dict[str, Any]:
    """Accuracy of a baseline, and the team's gain over it on the same tasks."""
    accuracy = mean(right_T)
    gain = compared(result.right_T, right_T)
    return {"accuracy": accuracy, "interval": wilson(accuracy, len(right_T)), "gain_of_team": gain}


def solo(team: Team, tasks: Sequence[Task], episodes: Sequence[Episode], result: Result) -> Numbers:
    """Every agent alone, in single turns."""
    numbers: Numbers = {}
    for agent in team.controller.agents:
        alone, seconds = played(team, with_agents(team.controller, [agent], "single_turn"), tasks)
        numbers[agent] = compared_with(result, accuracy_T(alone)) | {"cost": cost_of(alone, seconds)}
    return numbers


def vote(team: Team, tasks: Sequence[Task], episodes: Sequence[Episode], result: Result) -> Numbers:
    """The majority of as many answers of one agent as the team gives in an episode: the same sampling budget."""
    agents = episodes[0].agents
    answers = max(1, round(mean([len(conversation.team_turns(episode, agents)) for episode in episodes])))
    return {agent: voted(team, tasks, agent, answers, result) for agent in team.controller.agents}


def tokens(team: Team, tasks: Sequence[Task], episodes: Sequence[Episode], result: Result) -> Numbers:
    """The majority of as many answers of one agent as cost the tokens that the team samples in an episode."""
    agents = team.controller.agents
    if any(turn.billed_tokens and not turn.response_mask for episode in episodes for turn in episode.turns):
        reason = "an endpoint of the team returns no token ids, so the tokens that the team samples are not known"
        return {agent: {"reason": reason} for agent in agents}
    budget, numbers = result.numbers["cost"]["sampled_tokens_per_episode"], {}
    for agent in agents:
        answer = cost_of(*sampled_alone(team, tasks, agent, 1))["sampled_tokens_per_episode"]
        if budget and answer:
            numbers[agent] = voted(team, tasks, agent, max(1, round(budget / answer)), result)
        else:
            numbers[agent] = {"reason": "its server counts no tokens"}
    return numbers


def voted(team: Team, tasks: Sequence[Task], agent: AgentId, answers: int, result: Result) -> dict[str, Any]:
    """The majority of several answers of an agent to each task."""
    sampled, seconds = sampled_alone(team, tasks, agent, answers)
    cost = cost_of(sampled, seconds)
    cost["sampled_tokens_per_episode"] *= answers  # the cost of a vote, to compare with an episode of the team
    right_T = [float(majority_is_right(samples)) for samples in by_task(sampled)]
    return compared_with(result, right_T) | {"answers": answers, "cost": cost}


def sampled_alone(team: Team, tasks: Sequence[Task], agent: AgentId, answers: int) -> tuple[list[Episode], float]:
    """Several answers of an agent to each task, and their seconds; sampled, for greedy ones would all be the same."""
    return played(team, with_agents(team.controller, [agent], "single_turn"), tasks, answers, validate=False)


BASELINE: dict[str, Callable[..., Numbers]] = {"solo": solo, "vote": vote, "tokens": tokens}


def comparisons(results: Sequence[Result], labels: Sequence[str]) -> list[dict[str, Any]]:
    """The first team against each other one."""
    return [
        {"of": labels[0], "over": label, **compared(results[0].right_T, other.right_T)}
        for label, other in zip(labels[1:], results[1:], strict=True)
    ]


def known(key: str, words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Raises ConfigError for a word that is none of the names."""
    for word in words:
        if word not in names:
            raise ConfigError(f"{key}=[{word}]: expected some of {', '.join(names)}.{did_you_mean(word, names)}")
    return list(dict.fromkeys(words))
