"""Checkpoint folders: ``<root>/global_step_N``, written beside and renamed, so that a killed run leaves no half of one."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEP = re.compile(r"global_step_(\d+)")
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's tracker file."""
STATE = "trainer.json"
"""Written last inside a folder: a folder without it is not a checkpoint."""


@contextmanager
def writing(root: Path, step: int) -> Iterator[Path]:
    """A folder to fill; it becomes ``global_step_N`` when the block ends without an error."""
    temporary, final = root / f".tmp_global_step_{step}", root / f"global_step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    replace_text(root / TRACKER, str(step))


def replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    replace_text(folder / STATE, json.dumps(state))


def read_state(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError for a folder that is not a checkpoint."""
    path = folder / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE}: not a checkpoint of this project, or an incomplete one")
    return json.loads(path.read_text())


def complete(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return [folder for _, folder in numbered(root)]


def numbered(root: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints with their steps, oldest first."""
    found = [(int(match[1]), folder) for folder in root.glob("global_step_*") if (match := STEP.fullmatch(folder.name))]
    return [(step, folder) for step, folder in sorted(found) if (folder / STATE).is_file()]


def prune(root: Path, keep: int | None) -> None:
    """Remove the oldest ones beyond ``keep``."""
    if keep is not None:
        for folder in complete(root)[:-keep] if keep > 0 else []:
            shutil.rmtree(folder)
