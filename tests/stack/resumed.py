"""Comparison of a resumed run with the one that was never stopped."""

import json

import numpy as np
import torch
from safetensors.torch import load_file

from marl.utils import manifest
from marl.utils.pickles import read
from marl.utils.trees import load_tree


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


def assert_same_run(whole, resumed, after, steps, but=()):
    """``resumed`` began after step ``after``, and both end with step ``steps``. ``but``: keys of workers' states that may differ."""
    one, other = (states(folder / f"global_step_{steps}") for folder in (whole, resumed))
    assert list(one) == list(other)
    for state in (*one.values(), *other.values()):
        for key in but:
            state.pop(key, None)
    assert [name for name in one if not same(one[name], other[name])] == []
    rest = range(after + 1, steps + 1)
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
