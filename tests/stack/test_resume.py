"""A run that is stopped and resumed is the run that was never stopped: weights, optimizers, random states, metrics, dumps."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from marl.learners import LEARNERS
from marl.utils import manifest
from marl.utils.pickles import read
from marl.utils.trees import load_tree
from tests.stack.builders import ADAPTED

STEPS = 4
QUIET = (
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2", "trainer.logger=[file]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
)  # fmt: skip
"""The rate changes from step to step, so that a schedule that is one step off shows."""
OF_LEARNER = {
    "at_grpo": ("runner=tree", "credit=own"),
    "cory": ("runner=pioneer_observer", "credit=auto", "learner.exchange_every=2"),
    "magrpo": ("credit=auto",),
    "qmix": ("credit=team", "learner.target_update_every=2"),
    "rae": ("credit=auto",),
    "vdn": ("credit=team", "learner.target_update_every=2"),
}
INDIVIDUAL = {name: (f"learner={name}", *OF_LEARNER.get(name, ())) for name in LEARNERS.names()}
GROUPS = (
    "sharing=groups",
    "+agents.bob={}",
    "agents.alice.policy=pair",
    "agents.bob.policy=pair",
    "agents.carol.policy=one",
)
OF_SHARING = {"shared": ("sharing=shared",), "lora": ADAPTED, "groups": GROUPS}
SHARED = {
    f"{sharing}-{learner}": (*options, f"learner={learner}")
    for sharing, options in OF_SHARING.items()
    for learner in ("ippo", "mappo")
}
CASES = {**INDIVIDUAL, **SHARED}


@pytest.fixture
def fitted(alone, tmp_path):
    """Runs of one process, by name, each in a folder of its own."""

    def fit(name, *overrides):
        folder = tmp_path / name
        where = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
        live = alone(*QUIET, *where, *overrides)
        scramble(len(name))
        live.wait(live.trainer.fit())
        return folder

    return fit


def scramble(seed):
    """The global generators as another process might find them."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def states(checkpoint):
    """All that a checkpoint holds but what depends on its run's clock, by file."""
    found = {}
    for path in manifest.files_in(checkpoint):
        name = str(path.relative_to(checkpoint))
        if path.suffix == ".pt":
            found[name] = read(path)
        elif path.suffix == ".safetensors":
            found[name] = load_file(path) if "huggingface" in name or "lora_adapter" in name else load_tree(path)
        elif path.name == "trainer.json":
            found[name] = {key: value for key, value in json.loads(path.read_text()).items() if key != "seconds"}
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(*(getattr(t, "_local_tensor", t) for t in (one, other)))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def logged(folder):
    """The metrics of every step without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {key: value for key, value in line["data"].items() if not timed(key)} for line in lines}


def timed(key):
    return key.startswith(("timing", "perf/")) or key.split("/")[-1] in ("mfu", "worker_seconds") or "memory" in key


def dumps(folder, kind):
    return {int(path.stem): path.read_text() for path in (folder / kind).glob("*.jsonl")}


def assert_same_run(whole, resumed, after):
    """``resumed`` began after step ``after``."""
    one, other = (states(folder / f"global_step_{STEPS}") for folder in (whole, resumed))
    assert list(one) == list(other)
    assert [name for name in one if not same(one[name], other[name])] == []
    rest = range(after + 1, STEPS + 1)
    lines, wanted = logged(resumed), logged(whole)
    assert list(lines) == list(rest)
    assert [
        (step, key)
        for step in rest
        for key in lines[step] | wanted[step]
        if lines[step].get(key) != wanted[step].get(key)
    ] == []
    assert dumps(resumed, "rollouts") == {step: dumps(whole, "rollouts")[step] for step in rest}
    later = {step: text for step, text in dumps(whole, "validation").items() if step > after}
    assert dumps(resumed, "validation") == later and later


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_one_that_was_never_stopped(fitted, case):
    """Two cut points; between them the learner renews a target, or an exchange."""
    whole = fitted("whole", *CASES[case])
    for after in (1, 3):
        source = whole / f"global_step_{after}"
        named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}")
        assert_same_run(whole, fitted(f"resumed_{after}", *CASES[case], *named), after)
