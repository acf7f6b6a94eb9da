"""Baselines for a team: one agent that never talks, the vote over its answers, and the team before training.

``baseline=[solo,vote,untrained]`` trains and measures them after the run, in the same session and with the same settings,
and puts them beside it in ``summary.json`` and in the trackers.
"""

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from marl.config.policies import all_policies, own_settings
from marl.controller.ledger import forget_all
from marl.evaluation.statistics import by_task, mean
from marl.learners import CREDITS
from marl.marl_trainer import MARLTrainer
from marl.report import summary
from marl.run_setup import Setup
from marl.runners import RUNNERS, majority
from marl.types import Episode, Metrics
from marl.utils.manifest import replace_text
from marl.utils.metrics import prefixed
from marl.utils.seeding import derive_seed

BESIDE = "team.json"
"""Record of the team that a baseline is compared with: its steps, its tokens, and the samples of a task that follow from them."""
Build = Callable[[Setup, ExitStack], Awaitable[MARLTrainer]]


async def run_baselines(config: DictConfig, team: MARLTrainer, build: Build) -> None:
    """Measure every baseline that the configuration names, and rewrite the team's summary with them."""
    wanted = [config.baseline] if isinstance(config.baseline, str) else list(config.baseline)
    found: dict[str, Metrics] = {}
    if "untrained" in wanted:
        found["untrained"] = await untrained(config, team, build)
    if "solo" in wanted or "vote" in wanted:
        with ExitStack() as cleanup:
            settings = solo_config(config, answers_per_episode(team))
            keep_turns(settings, team)
            solo = await build(Setup.of(settings), cleanup)
            if schedules(solo) == {"constant"}:  # a cosine would rise again after the team's steps
                solo.total_steps *= 2  # the token budget ends it, for its answers may be shorter
            await solo.fit(token_budget=team.sampled_tokens)
            found["solo"] = of_history(solo)
            if "vote" in wanted:
                found["vote"] = await vote(solo, answers_per_episode(team))
    numbers = {f"{name}/{key}": value for name, entry in found.items() for key, value in entry.items()}
    team.tracking.log(prefixed("baseline", numbers), team.step_number)
    team.summarise(found)


def schedules(trainer: MARLTrainer) -> set[str]:
    """Learning-rate schedules of its policies."""
    return {own_settings(trainer.config, name).actor.optim.lr_scheduler_type for name in trainer.policies}


def answers_per_episode(team: MARLTrainer) -> int:
    """Number of answers per episode of the team over the whole run: the sampling budget of a single agent."""
    return max(1, round(team.answers_per_episode.mean or 0))


def solo_config(config: DictConfig, answers: int) -> DictConfig:
    """The same run for the first agent that is trained, alone: single turns, ``answers`` times as many samples of a task."""
    solo = config.copy()
    name = next(name for name, agent in config.agents.items() if agent.trainable)
    policies = all_policies({name: config.agents[name]})
    with open_dict(solo):
        solo.agents = {name: config.agents[name]}
        solo.policies = {key: value for key, value in config.policies.items() if key in policies}
        solo.runner = OmegaConf.structured(RUNNERS.get("single_turn").Config(name="single_turn"))
        solo.credit = OmegaConf.structured(CREDITS.get("own").Config(name="own"))
        solo.learner.train_rounds = None
        solo.actor_rollout_ref.rollout.n = config.actor_rollout_ref.rollout.n * answers
        solo.trainer.default_local_dir = f"{config.trainer.default_local_dir}/baseline_solo"
        solo.trainer.resume_mode, solo.trainer.logger = "disable", []
        solo.trainer.save_freq, solo.trainer.save_final = -1, False
        for key in ("rollout_data_dir", "validation_data_dir"):
            if config.trainer[key]:
                solo.trainer[key] = f"{solo.trainer.default_local_dir}/{key.removesuffix('_data_dir')}"
    return solo


def keep_turns(solo: DictConfig, team: MARLTrainer) -> None:
    """Let the baseline go on from its own turns where it was interrupted beside the same team: its steps are played again from
    its ledger. Otherwise it begins anew."""
    folder = Path(solo.trainer.default_local_dir)
    beside = {"steps": team.step_number, "sampled_tokens": team.sampled_tokens, "n": solo.actor_rollout_ref.rollout.n}
    settings = team.config.trainer
    if settings.resume_mode == "auto" and not settings.resume_changes and read_beside(folder) == beside:
        solo.trainer.resume_mode = "auto"
        return
    folder.mkdir(parents=True, exist_ok=True)
    forget_all(folder)
    replace_text(folder / BESIDE, json.dumps(beside))


def read_beside(folder: Path) -> Any:
    """The record that an interrupted baseline left; None where there is none that can be read."""
    try:
        return json.loads((folder / BESIDE).read_text())
    except (OSError, ValueError):
        return None


def of_history(trainer: MARLTrainer) -> Metrics:
    """Accuracy of the last round at the last validation, the number of sampled tokens, and the share of degenerate
    groups."""
    last = trainer.history[max(trainer.history)]
    return trainer.learner.summary() | {
        "accuracy": summary.last_accuracy(last),
        "sampled_tokens": float(trainer.sampled_tokens),
        "steps": float(trainer.step_number),
    }


async def untrained(config: DictConfig, team: MARLTrainer, build: Build) -> Metrics:
    """The team before its first step: measured by the run itself, or played again with the first weights."""
    if 0 in team.history:
        first = team.history[0]
    else:
        before = config.copy()
        with open_dict(before):
            before.trainer.val_only, before.trainer.resume_mode, before.trainer.logger = True, "disable", []
            before.trainer.default_local_dir = f"{config.trainer.default_local_dir}/baseline_untrained"
        with ExitStack() as cleanup:
            trainer = await build(Setup.of(before), cleanup)
            trainer.controller.go_on_from(team.controller.spent())  # an endpoint's budget is the run's
            await trainer.fit()
        first = trainer.history[0]
    return {"accuracy": summary.last_accuracy(first), "vote": first["vote"], "sampled_tokens": 0.0}


async def vote(solo: MARLTrainer, answers: int) -> Metrics:
    """Accuracy of the majority of several answers of the single agent to each validation task, sampled as in training:
    greedy ones, which validation asks for by default, would all be the same."""
    episodes = await solo.controller.measure(solo.validation, answers, solo.step_number, validate=False)
    return {
        "accuracy": mean([majority_is_right(samples) for samples in by_task(episodes)]),
        "answers": float(answers),
        "sampled_tokens": float(solo.sampled_tokens),
    }


def majority_is_right(episodes: Sequence[Episode]) -> bool:
    """Ties are broken by the task; nobody's answer is wrong. An answer is right where one of the texts that give it is."""
    answers = [episode.answer for episode in episodes]
    chosen = majority(answers, random.Random(derive_seed("vote", episodes[0].task.id)))
    return chosen is not None and any(e.scored.right for e in episodes if e.answer == chosen)
