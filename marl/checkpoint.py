"""A run's files: checkpoints (all policies and critics, the learner, the data order and the step, as one unit), and
its summary."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from marl.config.policies import policies_by_agent
from marl.controller import ledger
from marl.preflight.run_folder import RUN
from marl.report import run_summary
from marl.types import Metrics, Task
from marl.utils import folders
from marl.utils.metrics import RunningMean

if TYPE_CHECKING:
    from marl.marl_trainer import MARLTrainer

logger = logging.getLogger(__name__)
REQUIRED = {
    "policies", "critics", "references", "running_means", "histories", "answers_per_episode", "seconds", "old_log_probs",
    "spent_at_endpoints",
}  # fmt: skip


def validation_sampling(config: Any, sampling: Callable[..., Mapping[str, Any]]) -> dict[str, Any]:
    """Number of validation samples, and sampling parameters of every agent with each of its policies."""
    by_agent = {
        agent: [dict(sampling(agent, policy, True)) for policy in policies]
        for agent, policies in policies_by_agent(config.agents).items()
    }
    return {"n": config.actor_rollout_ref.rollout.val_kwargs.n, "agents": by_agent}


def fingerprint(tasks: Sequence[Task], sampling: Any = None) -> str:
    """Digest of a validation's tasks and sampling settings: its numbers are comparable only with those of the same
    validation."""
    rows = [[task.id, task.messages, task.ground_truth, task.data_source, task.extra] for task in tasks]
    content = [rows, sampling]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


async def save(trainer: MARLTrainer) -> None:
    """Write ``global_step_N``, whole or not at all, and drop the oldest of too many."""
    with folders.writing(trainer.folder, trainer.step_number) as folder:
        await asyncio.gather(
            *(group.save(folder / name / "actor") for name, group in trainer.policies.items()),
            *(group.save(folder / name / "critic") for name, group in trainer.critics.groups.items()),
            trainer.references.save(folder),
        )
        torch.save(trainer.tasks.state_dict(), folder / "data.pt")
        torch.save(trainer.learner.state_dict(), folder / "learner.pt")
        state: dict[str, Any] = {
            "sampled_tokens": trainer.sampled_tokens,
            "seconds": seconds_of(trainer),
            "answers_per_episode": [trainer.answers_per_episode.total, trainer.answers_per_episode.count],
            "step": trainer.step_number,
            "policies": sorted(trainer.policies),
            "critics": sorted(trainer.critics.groups),
            "references": trainer.references.state_dict(),
            "running_means": {name: [mean.total, mean.count] for name, mean in trainer.learner.running_means.items()},
            "accuracy": trainer.controller.accuracy.state_dict(),
            "spent_at_endpoints": trainer.controller.spent(),
            "log_prob_gap_max": trainer.log_prob_gap_max,
            "old_log_probs": trainer.old_log_probs.state_dict(),
            "histories": {data: list(history.items()) for data, history in trainer.histories.items()},
        }
        if (trainer.folder / RUN).is_file():
            shutil.copy(trainer.folder / RUN, folder)
        folders.write_state(folder, state)
    folders.prune(trainer.folder, trainer.config.trainer.max_actor_ckpt_to_keep)
    forget_ledgers(trainer, trainer.step_number - 1)  # the step's own: its validation may not have ended


def forget_ledgers(trainer: MARLTrainer, step: int) -> None:
    """Remove the ledgers up to a step, unless they are kept."""
    if not trainer.config.controller.keep_ledger:
        ledger.forget(trainer.folder, step)


async def resume(trainer: MARLTrainer) -> None:
    """Continue from the newest checkpoint, or the one that is named. Raises ValueError if its policies are others."""
    settings = trainer.config.trainer
    if settings.resume_mode == "disable":
        return
    found = folders.complete(trainer.folder)
    named = settings.resume_mode == "resume_path"
    folder = Path(settings.resume_from_path) if named else found[-1] if found else None
    if folder is None:
        return
    state = folders.read_state(folder)
    check_state(trainer, folder, state)
    await asyncio.gather(
        *(group.load(folder / name / "actor") for name, group in trainer.policies.items()),
        *(group.load(folder / name / "critic") for name, group in trainer.critics.groups.items()),
        trainer.references.load(folder, state["references"]),
    )
    trainer.tasks.load_state_dict(torch.load(folder / "data.pt", weights_only=True))
    load_learner(trainer, torch.load(folder / "learner.pt", weights_only=True))
    trainer.step_number, trainer.log_prob_gap_max = state["step"], state["log_prob_gap_max"]
    trainer.old_log_probs.load_state_dict(state["old_log_probs"])
    trainer.sampled_tokens = state["sampled_tokens"]
    trainer.answers_per_episode = RunningMean(*state["answers_per_episode"])
    trainer.earlier_seconds = state["seconds"] - process_seconds()
    trainer.learner.running_means = {name: RunningMean(*mean) for name, mean in state["running_means"].items()}
    trainer.controller.accuracy.load_state_dict(state["accuracy"])
    trainer.controller.go_on_from(state["spent_at_endpoints"])
    trainer.histories = {data: dict(history) for data, history in state["histories"].items()}
    logger.warning("resumed from %s", folder)


def check_state(trainer: MARLTrainer, folder: Path, state: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint of another version, or one with other policies or critics."""
    missing = sorted(REQUIRED - set(state))
    if missing:
        raise ValueError(
            f"{folder}: its state lacks {', '.join(missing)}: another version of marl saved it; resume with that version, or "
            "start a new run in another trainer.default_local_dir"
        )
    for kind, groups in {"policies": trainer.policies, "critics": trainer.critics.groups}.items():
        if state[kind] != sorted(groups):
            raise ValueError(f"{folder} holds the {kind} {state[kind]}, this run has {sorted(groups)}")
    unsaved = [
        name
        for name, group in trainer.policies.items()
        if group.takes_weights and not (folder / name / "actor").is_dir()
    ]
    if unsaved:
        raise ValueError(
            f"{folder} holds no weights of {', '.join(unsaved)}, which nobody trained then; set agents.<name>.trainable=false as it "
            "was, or start a new run in another trainer.default_local_dir"
        )


def load_learner(trainer: MARLTrainer, state: dict[str, Any]) -> None:
    """Raises ValueError for another learner's state, unless ``trainer.resume_changes`` allows another learner: that begins
    anew."""
    try:
        trainer.learner.load_state_dict(state)
    except ValueError as error:
        if not any(key.split(".")[0] == "learner" for key in trainer.config.trainer.resume_changes):
            raise
        logger.warning("the learner starts from scratch: %s", error)


def seconds_of(trainer: MARLTrainer) -> float:
    """Seconds up to the checkpoint that the run goes on from, and since then; of a new run, the driver's start-up included."""
    return trainer.earlier_seconds + process_seconds()


def process_seconds() -> float:
    return time.time() - psutil.Process().create_time()


def summarise(trainer: MARLTrainer, baselines: Mapping[str, Metrics]) -> None:
    """Write ``summary.json`` and ``curves.png``, where anything was validated."""
    if not trainer.history:
        return
    result = run_summary.summarise(
        trainer.history,
        steps=trainer.step_number,
        seconds=seconds_of(trainer),
        seed=trainer.config.seed,
        log_prob_gap_max=trainer.log_prob_gap_max,
        sampled_tokens=trainer.sampled_tokens,
        learner=trainer.learner.summary(),
        baselines=baselines,
    )
    folder = trainer.report_folder
    folder.mkdir(parents=True, exist_ok=True)
    run_summary.write_json(result, folder / "summary.json")
    run_summary.plot(trainer.history, folder / "curves.png")
