"""Results of a run, compared to the last bit."""

import json

import torch
from safetensors.torch import load_file


def results(folder):
    """Weights, optimizers, dumped episodes, metrics and summary: all that a run is about, without what its clock decides."""
    last = max(folder.glob("global_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
    weights = {path.parts[-4]: load_file(path) for path in last.glob("*/actor/huggingface/model.safetensors")}
    moments = {f"{path.parts[-3]}/{path.name}": read(path) for path in last.glob("*/actor/optim_*.pt")}
    dumps = {
        str(path.relative_to(folder)): [json.loads(line) for line in path.open()]
        for kind in ("rollouts", "validation")
        for path in folder.glob(f"{kind}/*.jsonl")
    }
    metrics = [json.loads(line) for path in folder.glob("metrics.jsonl") for line in path.open()]
    logged: dict = {}
    for line in metrics:  # a validation that a kill cut off is repeated after the resume, on a line of its own
        logged.setdefault(line["step"], {}).update(timeless(line["data"]))
    assert weights and moments and dumps
    summary = [timeless(json.loads(path.read_text())) for path in folder.glob("summary.json")]
    return {
        "step": last.name, "weights": weights, "moments": moments, "dumps": dumps, "metrics": logged, "summary": summary
    }  # fmt: skip


def read(path):
    return torch.load(path, weights_only=False)


def timeless(data):
    own = ("timing", "perf/", "seconds", "restarts")
    return {
        key: value
        for key, value in data.items()
        if not key.startswith(own) and not key.endswith(("mfu", "seconds")) and "memory" not in key
    }


def differing(one, other, at=""):
    """Places at which two results differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [
            place
            for key in keys
            for place in (
                differing(one[key], other[key], f"{at}/{key}") if key in one and key in other else [f"{at}/{key}"]
            )
        ]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [place for i, pair in enumerate(zip(one, other, strict=True)) for place in differing(*pair, f"{at}/{i}")]
    if hasattr(one, "to_local"):
        one, other = one.to_local(), other.to_local()
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [at]


def unequal(one, other):
    """Names of what differs between two runs' folders."""
    return sorted({place.split("/")[1] for place in differing(results(one), results(other))})
