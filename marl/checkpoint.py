"""A run's checkpoints: all policies and critics, the learner, the data order and the step, as one unit."""

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
from typing import Any

from marl.cluster.critic_group import CriticGroup
from marl.cluster.log_probs import References
from marl.cluster.policy_group import PolicyGroup
from marl.cluster.shared_folder import check_shared
from marl.config.deadlines import Deadline, Phase, deadline_of
from marl.config.errors import ConfigError
from marl.config.identity import code_fingerprint, fingerprints
from marl.config.policies import policies_by_agent
from marl.controller import ledger
from marl.learners import Learner
from marl.platform.determinism import random_states, set_random_states
from marl.preflight.run_folder import RUN, check_ranks, family_of, must_hold_all_states, read_identity, to_resume
from marl.types import CriticName, Metrics, PolicyName, Task
from marl.utils import folders, manifest
from marl.utils.background import Background
from marl.utils.best import best_steps
from marl.utils.manifest import sync_file
from marl.utils.marks import wait_for
from marl.utils.trees import copied, load_tree, save_tree

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


@dataclass(frozen=True)
class Trained:
    """The parts of a run that a checkpoint holds, besides the trainer's own numbers."""

    config: Any
    folder: Path
    policies: Mapping[PolicyName, PolicyGroup]
    critics: Mapping[CriticName, CriticGroup]
    references: References
    learner: Learner
    tasks: Any
    """The stream of training data."""

    def state_dict(self) -> dict[str, Any]:
        """Names and numbers."""
        names = {"policies": sorted(self.policies), "critics": sorted(self.critics)}
        return names | {"references": self.references.state_dict()}

    def world_sizes(self) -> dict[str, int]:
        """Ranks of every worker group that leaves weights."""
        policies = {name: group for name, group in self.policies.items() if group.takes_weights}
        actors = {f"{name}/actor": group.workers.world_size for name, group in policies.items()}
        return actors | {f"{name}/critic": group.workers.world_size for name, group in self.critics.items()}


async def save(run: Trained, state: Mapping[str, Any], metrics: Metrics, saving: Background) -> None:
    """Write the run's state as ``global_step_N``, in the background unless ``trainer.save_in_background`` is off,
    whole or not at all; then drop what is kept no longer. Waits for the former save, and raises its error. ``state``: the
    trainer's own numbers; ``metrics``: its step's."""
    await saving.flush()
    step, beside = state["step"], run.config.trainer.save_in_background
    folder = folders.begin(run.folder, step)
    groups = await asyncio.gather(
        *(group.save(folder / name / "actor", beside) for name, group in run.policies.items()),
        *(group.save(folder / name / "critic", beside) for name, group in run.critics.items()),
        run.references.save(folder, beside),
    )
    if (run.folder / RUN).is_file():
        shutil.copy(run.folder / RUN, folder)
    folders.write_state(folder, {**state, **run.state_dict()})
    trees = copied({"data": run.tasks.state_dict(), "learner": run.learner.state_dict()}) | {"random": random_states()}
    marks, deadline = list(chain.from_iterable(groups)), deadline_of(run.config.resources, Phase.save)
    ends = saving.failing.is_set, saving.hopeless.is_set
    parts = folder, trees, facts_of(run, step, metrics), marks, deadline, Kept.of(run.config), *ends
    saving.start(partial(finish, moves=saving.move), *parts)


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


def facts_of(run: Trained, step: int, metrics: Metrics) -> dict[str, Any]:
    """Facts for the manifest: whose checkpoint it is, of which step, and from what it was made."""
    return {
        "step": step,
        "family": family_of(run.folder),
        "world_size": run.world_sizes(),
        "fingerprints": fingerprints(read_identity(run.folder)),
        "metrics": {key: float(value) for key, value in metrics.items()},
    }


async def resume(run: Trained) -> dict[str, Any] | None:
    """Load the newest checkpoint that is whole, or the one that is named, and return the trainer's own numbers; None without one.
    Raises ValueError if its policies are others, and ConfigError if there are checkpoints and none is whole."""
    settings = run.config.trainer
    if settings.save_freq > 0 or settings.save_final:
        saved = [group for group in run.policies.values() if group.takes_weights]
        await check_shared(run.folder, [*saved, *run.critics.values()])
    folder, refused = to_resume(settings, run.folder)
    for name, why in refused.items():
        logger.warning("%s is not used: %s", run.folder / name, why)
    if folder is None:
        ledger.forget_after_a_gap(run.folder, 0)
        return None
    state: dict[str, Any] = folders.read_state(folder)
    check_state(run, folder, state)
    check_source(run, folder, manifest.facts_of(folder))
    must_hold_all_states(run.config, folder)
    await asyncio.gather(
        *(group.load(folder / name / "actor") for name, group in run.policies.items()),
        *(group.load(folder / name / "critic") for name, group in run.critics.items()),
        run.references.load(folder, state["references"]),
    )
    ledger.forget_after_a_gap(run.folder, state["step"])
    data, learner, chance = (load_tree(folder / f"{name}.safetensors") for name in ("data", "learner", "random"))
    run.tasks.load_state_dict(data)
    load_learner(run, learner)
    set_random_states(chance)
    own = folder.parent.resolve() == run.folder.resolve()
    if own and settings.resume_mode == "auto" and not settings.val_only:
        await asyncio.to_thread(settle, run.folder, state["step"], Kept.of(run.config))
    logger.warning("resumed from %s", folder)
    return state


def check_state(run: Trained, folder: Path, state: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint of another version, or one with other policies or critics."""
    missing = sorted(REQUIRED - set(state))
    if missing:
        raise ValueError(
            f"{folder}: its state lacks {', '.join(missing)}: another version of marl saved it; resume with that version, or "
            "start a new run in another trainer.default_local_dir"
        )
    for kind, groups in {"policies": run.policies, "critics": run.critics}.items():
        if state[kind] != sorted(groups):
            raise ConfigError(
                f"{folder} holds the {kind} {state[kind]}, and this run has {sorted(groups)}; expected the same: resume with the "
                "settings that it was saved with, or begin a new run from its weights (model.path=…/<policy>/actor/huggingface)"
            )
    unsaved = [
        name for name, group in run.policies.items() if group.takes_weights and not (folder / name / "actor").is_dir()
    ]
    if unsaved:
        raise ValueError(
            f"{folder} holds no weights of {', '.join(unsaved)}, which nobody trained then; set agents.<name>.trainable=false as it "
            "was, or start a new run in another trainer.default_local_dir"
        )


def check_source(run: Trained, folder: Path, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError where other numbers of ranks saved the shards; warn of other source files."""
    for part, ranks in run.world_sizes().items():
        check_ranks(folder, part, facts["world_size"].get(part), ranks)
    if facts["fingerprints"]["code"] != code_fingerprint():
        logger.warning(
            "%s was saved with other source files (of marl, or of your own modules): the run may not go on as it would have",
            folder,
        )


def load_learner(run: Trained, state: dict[str, Any]) -> None:
    """Raises ValueError for another learner's state, unless ``trainer.resume_changes`` allows another learner: that begins
    anew."""
    try:
        run.learner.load_state_dict(state)
    except ValueError as error:
        if not any(key.split(".")[0] == "learner" for key in run.config.trainer.resume_changes):
            raise
        logger.warning("the learner starts from scratch: %s", error)
