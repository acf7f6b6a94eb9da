"""All that a run is about, for comparison: weights, optimizers, dumped episodes and validation."""

import json

import torch
from safetensors.torch import load_file


def results(folder):
    last = max(folder.glob("global_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
    weights = {path.parts[-4]: load_file(path) for path in last.glob("*/actor/huggingface/model.safetensors")}
    moments = {path.parts[-3]: torch.load(path, weights_only=False) for path in last.glob("*/actor/optim_*.pt")}
    dumps = {
        str(path.relative_to(folder)): [json.loads(line) for line in path.open()]
        for kind in ("rollouts", "validation")
        for path in folder.glob(f"{kind}/*.jsonl")
    }
    assert len(weights) == len(moments) == 2 and dumps
    return {"step": last.name, "weights": weights, "moments": moments, "dumps": dumps}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "to_local"):
        one, other = one.to_local(), other.to_local()
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def unequal(one, other):
    """Names of what differs between two runs' folders."""
    found, wanted = results(one), results(other)
    return [name for name in wanted if not equal(found[name], wanted[name])]
