"""A process that saves one checkpoint after another, by the code of a run, for others to kill."""

import os
from functools import partial
from pathlib import Path

import torch

from marl import checkpoint
from marl.checkpoint import Kept
from marl.cluster.workers import shard_files
from marl.config.deadlines import Deadline
from marl.utils import folders, marks
from marl.utils.pickles import read
from marl.utils.trees import load_tree

POLICIES = ("alice", "carol")
FAMILY = "of this run"
KEPT = Kept(last=2, best=1, metric="val/team/vote")


def state(step, policy):
    """A small network's weights and moments at a step: every number tells of which."""
    value = float(step * len(POLICIES) + POLICIES.index(policy))
    return {"weights": torch.full((64, 128), value), "moments": {"exp_avg": torch.full((64, 128), value)}, "step": step}


def save(root, step):
    """Save as a run of two policies does between a step's end and its checkpoint."""
    folder = folders.begin(root, step)
    for policy in POLICIES:
        file = folder / policy / "actor" / "model_world_size_1_rank_0.pt"
        shard_files.write(file.parent, 0, [partial(torch.save, state(step, policy), file)])
    folders.write_state(folder, {"step": step})
    expected = [mark for policy in POLICIES for mark in marks.marks_of(folder / policy / "actor", 1)]
    facts = {"step": step, "family": FAMILY, "world_size": {}, "metrics": {KEPT.metric: float(step % 5)}}
    trees = {"data": {"position": step}, "learner": {"mixer": torch.full((8,), float(step))}}
    checkpoint.finish(folder, trees, facts, expected, Deadline(30.0, "resources.save_timeout_s"), KEPT)


def holds(folder, step):
    """True if a checkpoint holds one step's state, and nothing of another's."""
    parts = [
        (read(folder / policy / "actor" / "model_world_size_1_rank_0.pt"), state(step, policy)) for policy in POLICIES
    ]
    parts.append((load_tree(folder / "learner.safetensors"), {"mixer": torch.full((8,), float(step))}))
    parts.append((load_tree(folder / "data.safetensors"), {"position": step}))
    return folders.read_state(folder) == {"step": step} and all(equal(*pair) for pair in parts)


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def saves_on(root: Path, first: int, told: int):
    """Save without end; a byte to ``told`` as each save begins and ends."""
    step = first
    while True:
        os.write(told, b"b")
        save(root, step)
        os.write(told, b"e")
        step += 1
