"""A run's files: checkpoints (all policies and critics, the learner, the data order and the step, as one unit), and
its summary."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl.cluster.shared_folder import check_shared
from marl.config.deadlines import Deadline, Phase, deadline_of
from marl.config.errors import ConfigError
from marl.config.identity import code_fingerprint, fingerprints
from marl.config.policies import policies_by_agent
from marl.controller import ledger
from marl.platform.determinism import random_states, set_random_states
from marl.preflight.resumed_parts import check_ranks, must_hold_all_states
from marl.preflight.run_folder import RUN, family_of, read_identity, restarts_of, to_resume
from marl.report import run_summary
from marl.types import Metrics, Task
from marl.utils import folders, manifest
from marl.utils.best import best_steps
from marl.utils.manifest import sync_file
from marl.utils.marks import wait_for
from marl.utils.metrics import RunningMean
from marl.utils.process_time import process_seconds
from marl.utils.trees import copied, load_tree, save_tree

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
    """Write the run's state as ``global_step_N``, in the background unless ``trainer.save_in_background`` is off,
    whole or not at all; then drop what is kept no longer. Waits for the former save, and raises its error."""
    await trainer.saving.flush()
    folder = folders.begin(trainer.folder, trainer.step_number)
    beside = trainer.config.trainer.save_in_background
    groups = await asyncio.gather(
        *(group.save(folder / name / "actor", beside) for name, group in trainer.policies.items()),
        *(group.save(folder / name / "critic", beside) for name, group in trainer.critics.groups.items()),
        trainer.references.save(folder, beside),
    )
    if (trainer.folder / RUN).is_file():
        shutil.copy(trainer.folder / RUN, folder)
    folders.write_state(folder, state_of(trainer))
    trees = copied({"data": trainer.tasks.state_dict(), "learner": trainer.learner.state_dict()}) | {
        "random": random_states()
    }
    marks, deadline = list(chain.from_iterable(groups)), deadline_of(trainer.config.resources, Phase.save)
    facts, kept, saving = facts_of(trainer), Kept.of(trainer.config), trainer.saving
    ends = saving.failing.is_set, saving.hopeless.is_set
    saving.start(partial(finish, moves=saving.move), folder, trees, facts, marks, deadline, kept, *ends)


def finish(
    folder: Path,
    trees: Mapping[str, Any],
    facts: Mapping[str, Any],
    marks: Collection[Path],
    deadline: Deadline,
    kept: Kept,
    *ends: Callable[[], bool],
    moves: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the ranks' parts, and make the folder a checkpoint; a half that nobody will finish is removed. ``moves`` is called
    as the work gets on."""
    try:
        for name, tree in trees.items():
            save_tree(tree, folder / f"{name}.safetensors")
        wait_for(marks, *deadline, *ends, moves=moves)
        sync_file(folder.parent / folders.METRICS)
        folders.publish(folder.parent, facts["step"], facts, moves)
    except BaseException:
        moves()  # where it was given up, the folder is another attempt's by now
        folders.remove(folder)
        raise
    moves()
    kept.prune(folder.parent, whole=facts["step"])
    kept.forget_ledgers(folder.parent, facts["step"] - 1)  # the step's own: its validation may not have ended


def settle(root: Path, step: int, kept: Kept) -> None:
    """Complete a save that was killed after writing ``step``: record it as the newest and prune old checkpoints, since the next
    save may need the room."""
    folders.track(root, step)
    kept.prune(root, whole=step)


@dataclass(frozen=True)
class Kept:
    """Checkpoints that stay: the last ones, and the best ones by a metric of their steps."""

    last: int | None
    best: int
    metric: str
    ledgers: bool = False
    """Ledgers of all steps stay, not only of those that a resumed run needs."""

    @classmethod
    def of(cls, config: Any) -> Kept:
        settings = config.trainer
        last = settings.max_actor_ckpt_to_keep
        last = 1 if last is None and settings.keep_best else last
        return cls(last, settings.keep_best, settings.keep_best_metric, config.controller.keep_ledger)

    def prune(self, root: Path, whole: int | None = None) -> None:
        """``whole``: the step of a checkpoint that is known to be so."""
        if self.last is not None:
            folders.prune(root, self.last, best_steps(root, self.metric, self.best, self.last), whole)

    def forget_ledgers(self, root: Path, step: int) -> None:
        """Remove the ledgers up to a step, unless all stay."""
        if not self.ledgers:
            ledger.forget(root, step)


def state_of(trainer: MARLTrainer) -> dict[str, Any]:
    """The numbers and names of ``trainer.json``."""
    return {
        "sampled_tokens": trainer.sampled_tokens,
        "seconds": seconds_of(trainer),
        "answers_per_episode": [trainer.answers_per_episode.total, trainer.answers_per_episode.count],
        "step": trainer.step_number,
        "policies": sorted(trainer.policies),
        "critics": sorted(trainer.critics.groups),
        "references": trainer.references.state_dict(),
        "running_means": {name: [mean.total, mean.count] for name, mean in trainer.learner.running_means.items()},
        "accuracy": trainer.controller.accuracy.state_dict(),
        "spent_at_endpoints": trainer.controller.spent() if trainer.unsettled is None else trainer.unsettled,
        "log_prob_gap_max": trainer.log_prob_gap_max,
        "old_log_probs": trainer.old_log_probs.state_dict(),
        "histories": {data: list(history.items()) for data, history in trainer.histories.items()},
    }


def facts_of(trainer: MARLTrainer) -> dict[str, Any]:
    """Facts for the manifest: whose checkpoint it is, of which step, and from what it was made."""
    return {
        "step": trainer.step_number,
        "family": family_of(trainer.folder),
        "world_size": world_sizes(trainer),
        "fingerprints": fingerprints(read_identity(trainer.folder)),
        "metrics": {key: float(value) for key, value in trainer.last_metrics.items()},
    }


def world_sizes(trainer: MARLTrainer) -> dict[str, int]:
    """Ranks of every worker group that leaves weights."""
    policies = {name: group for name, group in trainer.policies.items() if group.takes_weights}
    actors = {f"{name}/actor": group.workers.world_size for name, group in policies.items()}
    return actors | {f"{name}/critic": group.workers.world_size for name, group in trainer.critics.groups.items()}


async def resume(trainer: MARLTrainer) -> None:
    """Continue from the newest checkpoint that is whole, or from the one that is named. Raises ValueError if its policies are
    others, and ConfigError if there are checkpoints and none is whole."""
    settings = trainer.config.trainer
    if settings.save_freq > 0 or settings.save_final:
        await check_shared(trainer.folder, [group for group in trainer.groups if getattr(group, "takes_weights", True)])
    trainer.restarts = restarts_of(trainer.folder)
    folder, refused = to_resume(settings, trainer.folder)
    for name, why in refused.items():
        logger.warning("%s is not used: %s", trainer.folder / name, why)
    if folder is None:
        return ledger.forget_after_a_gap(trainer.folder, 0)
    state = folders.read_state(folder)
    check_state(trainer, folder, state)
    check_source(trainer, folder, manifest.facts_of(folder))
    must_hold_all_states(trainer.config, folder)
    await asyncio.gather(
        *(group.load(folder / name / "actor") for name, group in trainer.policies.items()),
        *(group.load(folder / name / "critic") for name, group in trainer.critics.groups.items()),
        trainer.references.load(folder, state["references"]),
    )
    restore(trainer, state)
    ledger.forget_after_a_gap(trainer.folder, trainer.step_number)
    data, learner, chance = (load_tree(folder / f"{name}.safetensors") for name in ("data", "learner", "random"))
    trainer.tasks.load_state_dict(data)
    load_learner(trainer, learner)
    set_random_states(chance)
    own = folder.parent.resolve() == trainer.folder.resolve()
    if own and settings.resume_mode == "auto" and not settings.val_only:
        await asyncio.to_thread(settle, trainer.folder, trainer.step_number, Kept.of(trainer.config))
    logger.warning("resumed from %s", folder)


def end_ledger(trainer: MARLTrainer) -> None:
    """Remove the ledgers of a run that has come to its end, unless all stay."""
    trainer.controller.ledger.close()
    Kept.of(trainer.config).forget_ledgers(trainer.folder, trainer.step_number)


def restore(trainer: MARLTrainer, state: Mapping[str, Any]) -> None:
    """Take up what ``trainer.json`` holds."""
    trainer.step_number, trainer.log_prob_gap_max = state["step"], state["log_prob_gap_max"]
    trainer.old_log_probs.load_state_dict(state["old_log_probs"])
    trainer.sampled_tokens = state["sampled_tokens"]
    trainer.answers_per_episode = RunningMean(*state["answers_per_episode"])
    trainer.earlier_seconds = state["seconds"] - process_seconds()
    trainer.learner.running_means = {name: RunningMean(*mean) for name, mean in state["running_means"].items()}
    trainer.controller.accuracy.load_state_dict(state["accuracy"])
    trainer.controller.go_on_from(state["spent_at_endpoints"])
    trainer.histories = {data: dict(history) for data, history in state["histories"].items()}


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
            raise ConfigError(
                f"{folder} holds the {kind} {state[kind]}, and this run has {sorted(groups)}; expected the same: resume with the "
                "settings that it was saved with, or begin a new run from its weights (model.path=…/<policy>/actor/huggingface)"
            )
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


def check_source(trainer: MARLTrainer, folder: Path, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError where other numbers of ranks saved the shards; warn of other source files."""
    for part, ranks in world_sizes(trainer).items():
        check_ranks(folder, part, facts["world_size"].get(part), ranks)
    if facts["fingerprints"]["code"] != code_fingerprint():
        logger.warning(
            "%s was saved with other source files (of marl, or of your own modules): the run may not go on as it would have",
            folder,
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


def summarise(trainer: MARLTrainer, baselines: Mapping[str, Metrics]) -> None:
    """Write ``summary.json`` and ``curves.png``, where anything was validated."""
    if not trainer.history:
        return
    result = run_summary.summarise(
        trainer.history,
        problems=len(trainer.validation),
        steps=trainer.step_number,
        seconds=seconds_of(trainer),
        restarts=trainer.restarts,
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
