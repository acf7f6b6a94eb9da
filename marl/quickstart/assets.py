"""Files of the embedded tasks: a warm-started model with its tokenizer, and problems as parquet. Made once, kept."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from marl.config.errors import ConfigError, ModelMissing
from marl.config.values import check_number
from marl.quickstart import smollm2
from marl.quickstart.tasks import TASKS, rows
from marl.utils.registry import did_you_mean

FINGERPRINT = "settings.json"
MADE = frozenset({"model", "train.parquet", "test.parquet", FINGERPRINT})
VERSION = 3
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
    lr_warmup_steps: int = 30
    parts: int = 2
    """Parts of a batch; the gradients of two of them are computed at once. More parts take less memory."""
    pretrained: bool = False
    """The model is SmolLM2 instead of a tiny one with words of its own."""


RECIPES = {
    "smudged_note": Recipe("smudged_note", steps=700, batch=64),
    "smudged_sums": Recipe(
        "smudged_sums", steps=16, batch=32, lr=5e-5, test_problems=128, lr_warmup_steps=2, parts=8, pretrained=True
    ),
    "split_information": Recipe("split_information", steps=600, batch=64, lr=2e-3, test_problems=300),
    **{
        task: Recipe(task, steps=150, batch=64, lr=2e-3, train_problems=256)
        for task in TASKS
        if task.startswith("game")
    },
}


def ensure_for(config: Any, on_step: Callable[[int, int], None] = lambda done, of: None, renew: bool = False) -> bool:
    """:func:`ensure` for a configuration's ``task``, ``seed`` and ``assets``. Raises ConfigError where these name nothing, and,
    without ``renew``, where the folder belongs to other ones."""
    return ensure(*wanted(config, renew), on_step)


def wanted(config: Any, renew: bool) -> tuple[Path, Recipe, int]:
    """The folder, the recipe and the seed of a configuration. Raises ConfigError as :func:`ensure_for` does."""
    check_number(config, "seed")
    if config.task not in RECIPES:
        raise ConfigError(
            f"task={config.task}: expected one of {', '.join(RECIPES)}.{did_you_mean(str(config.task), RECIPES)}"
        )
    folder, recipe = Path(config.assets), RECIPES[config.task]
    must_hold_only_assets(folder)
    found = fingerprint_in(folder)
    if not renew and found and found != fingerprint_of(recipe, config.seed):
        raise ConfigError(
            f"assets={folder}: holds those of task={found['task']} seed={found['seed']}, or of another version; expected task="
            f"{config.task} seed={config.seed} of this one; name another folder, or let marl quickstart make this one again"
        )
    return folder, recipe, config.seed


def prepared(config: Any, prepare: Callable[[Any], Any]) -> Any:
    """The run that ``prepare`` makes of a configuration. Where only the embedded model is missing, it is made. Raises ConfigError."""
    try:
        return prepare(config)
    except ModelMissing as error:
        must_be_embedded(config, error)
        asked = wanted(config, renew=False)
        say(f"{config.assets}: making the model and its problems, once: {length_of(asked[1])} on a CPU")
        ensure(*asked, tell_quarters)
        return prepare(config)


@contextmanager
def planned(config: Any, prepare: Callable[[Any], Any]) -> Iterator[Any]:
    """The same for a plan, which needs a model's size and not its weights: a missing one is untrained, and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="marl-plan-") as scratch:
        try:
            setup = prepare(config)
        except ModelMissing as error:
            must_be_embedded(config, error)
            folder, recipe, seed = wanted(config, renew=False)
            say(f"{folder}: the model is not made yet; marl train makes it, once, in {length_of(recipe)} on a CPU")
            config.assets = f"{scratch}/made"
            make(
                Path(config.assets), replace(recipe, steps=0), seed, lambda done, of: None, folder.parent / smollm2.NAME
            )
            setup = prepare(config)
        yield setup


def must_be_embedded(config: Any, error: ModelMissing) -> None:
    """Raise the error where the missing model is not that of ``assets``."""
    assets = config.get("assets")
    if assets is None or Path(error.path) != Path(assets) / "model":
        raise error


def length_of(recipe: Recipe) -> str:
    return "some minutes" if recipe.pretrained else "half a minute"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def tell_quarters(done: int, of: int) -> None:
    if done * 4 % of < 4:
        say(f"making the model: {done}/{of} steps")


def ensure(
    folder: Path, recipe: Recipe, seed: int, on_step: Callable[[int, int], None] = lambda done, of: None
) -> bool:
    """Create whatever is missing; return whether anything was. ``on_step`` is called after every warm-up step. Raises ConfigError
    for a folder that holds anything else."""
    fingerprint = fingerprint_of(recipe, seed)
    if is_made(folder, fingerprint):
        return False
    must_hold_only_assets(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"assets={folder}: cannot be made: {error}; set the environment variable MARL_CACHE, or assets, to a folder that can"
        ) from None
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.making-") as scratch:
        making = Path(scratch) / "made"
        make(making, recipe, seed, on_step, folder.parent / smollm2.NAME)
        if not is_made(folder, fingerprint):  # by another run meanwhile, which reads it
            must_hold_only_assets(folder)
            if folder.exists():
                folder.rename(Path(scratch) / "renewed")
            making.rename(folder)
    return True


def make(folder: Path, recipe: Recipe, seed: int, on_step: Callable[[int, int], None], pretrained: Path) -> None:
    """Write the assets into a new folder; ``pretrained`` is where SmolLM2 is kept, for the recipes that begin with it."""
    # heavy: not imported by a run whose model is there
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from marl.quickstart import model as models

    folder.mkdir()
    task = TASKS[recipe.task]()
    if recipe.pretrained:
        source = smollm2.ensure(pretrained)
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    else:
        tokenizer = models.build_tokenizer()
        model = models.build_model(tokenizer, seed, recipe.heads)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of each of the two that warm up
    schedule = recipe.steps, recipe.batch, recipe.lr, seed
    encode = models.encode_chat if recipe.pretrained else models.encode_words
    steps = models.warm_up(model, tokenizer, task, *schedule, encode, recipe.lr_warmup_steps, recipe.parts)
    for step, _ in enumerate(steps, start=1):
        on_step(step, recipe.steps)
    torch.set_num_threads(threads)
    models.save(model, tokenizer, folder / "model")
    for name, count, split in (("train", recipe.train_problems, "train"), ("test", recipe.test_problems, "test")):
        table = pyarrow.Table.from_pylist(list(rows(task, count, seed, split)))  # type: ignore[arg-type]
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    (folder / FINGERPRINT).write_text(json.dumps(fingerprint_of(recipe, seed)))


def fingerprint_of(recipe: Recipe, seed: int) -> dict[str, Any]:
    return asdict(recipe) | {"seed": seed}


def must_hold_only_assets(folder: Path) -> None:
    """Raise ConfigError for a folder with anything else in it: renewing the assets removes it."""
    if not folder.exists():
        return
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if inside and (fingerprint_in(folder) is None or inside - MADE):
        raise ConfigError(f"assets={folder}: holds other files; name a new or empty folder")


def is_made(folder: Path, fingerprint: dict[str, Any]) -> bool:
    return fingerprint_in(folder) == fingerprint and (folder / "model" / "config.json").is_file()


def fingerprint_in(folder: Path) -> dict[str, Any] | None:
    """The settings that the folder's assets were made with; None where it holds none."""
    try:
        found = json.loads((folder / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"task", "seed"} <= set(found) else None
