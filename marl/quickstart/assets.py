"""Files of the embedded tasks: a warm-started model with its tokenizer, and problems as parquet. Made once, kept."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from marl.config.bounds import check_number
from marl.config.errors import ConfigError, ModelMissing
from marl.quickstart.tasks import TASKS, rows
from marl.utils.registry import did_you_mean

FINGERPRINT = "settings.json"
VERSION = 2
"""Raise it when the same settings make something else."""


@dataclass(frozen=True)
class Recipe:
    """Warm-up settings of a task's model, and the number of problems."""

    task: str
    steps: int
    batch: int
    lr: float = 4e-3
    train_problems: int = 4096
    test_problems: int = 256
    version: int = VERSION
    heads: int = 4
    """Attention heads of 64 / heads numbers each; vLLM's kernels want at least 32."""


RECIPES = {
    "smudged_note": Recipe("smudged_note", steps=700, batch=64),
    "split_information": Recipe("split_information", steps=600, batch=64, lr=2e-3, test_problems=300),
    **{
        task: Recipe(task, steps=150, batch=64, lr=2e-3, train_problems=256)
        for task in TASKS
        if task.startswith("game")
    },
}


def ensure_for(config: Any, on_step: Callable[[int, int], None] = lambda done, of: None) -> bool:
    """:func:`ensure` for a configuration's ``task``, ``seed`` and ``assets``. Raises ConfigError where these name nothing."""
    check_number(config, "seed")
    if config.task not in RECIPES:
        raise ConfigError(
            f"task={config.task}: expected one of {', '.join(RECIPES)}.{did_you_mean(str(config.task), RECIPES)}"
        )
    return ensure(Path(config.assets), RECIPES[config.task], config.seed, on_step)


def prepared(config: Any, prepare: Callable[[Any], Any]) -> Any:
    """The run that ``prepare`` makes of a configuration. Where only the embedded model is missing, it is made. Raises ConfigError."""
    try:
        return prepare(config)
    except ModelMissing as error:
        assets = config.get("assets")
        if assets is None or not Path(error.path).is_relative_to(assets):
            raise
        sys.stdout.write(f"{assets}: making the tiny model and its problems, once: half a minute on a CPU\n")
        sys.stdout.flush()
        ensure_for(config)
        return prepare(config)


def ensure(
    folder: Path, recipe: Recipe, seed: int, on_step: Callable[[int, int], None] = lambda done, of: None
) -> bool:
    """Create whatever is missing; return whether anything was. ``on_step`` is called after every warm-up step."""
    fingerprint = asdict(recipe) | {"seed": seed}
    if is_made(folder, fingerprint):
        return False
    making = folder.with_name(f"{folder.name}.making-{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    # heavy: not imported by a run whose model is there
    import torch

    from marl.quickstart.model import build_model, build_tokenizer, save, warm_up

    task, tokenizer = TASKS[recipe.task](), build_tokenizer()
    model = build_model(tokenizer, seed, recipe.heads)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two are slower on a model this small
    for step, _ in enumerate(warm_up(model, tokenizer, task, recipe.steps, recipe.batch, recipe.lr, seed), start=1):
        on_step(step, recipe.steps)
    torch.set_num_threads(threads)
    save(model, tokenizer, making / "model")
    for name, count, split in (("train", recipe.train_problems, "train"), ("test", recipe.test_problems, "test")):
        table = pyarrow.Table.from_pylist(list(rows(task, count, seed, split)))  # type: ignore[arg-type]
        pyarrow.parquet.write_table(table, making / f"{name}.parquet")
    (making / FINGERPRINT).write_text(json.dumps(fingerprint))
    if is_made(folder, fingerprint):  # by another run meanwhile, which reads it
        shutil.rmtree(making)
        return True
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)
    return True


def is_made(folder: Path, fingerprint: dict[str, Any]) -> bool:
    written = folder / FINGERPRINT
    return written.is_file() and json.loads(written.read_text()) == fingerprint
