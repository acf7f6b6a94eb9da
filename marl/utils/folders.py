"""Checkpoint folders: ``<root>/global_step_N``, written beside, sealed by a manifest and renamed, so that neither a kill nor a
loss of power leaves half of one; read only where all of it is as it was sealed."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from marl.utils.manifest import MANIFEST, Damaged, facts_of, replace_text, seal, sync_folder, verify
from marl.utils.pickles import foreign_names
from marl.utils.plain_files import opener

STEP = re.compile(r"global_step_(\d+)")
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's tracker file."""
STATE = "trainer.json"
METRICS = "metrics.jsonl"
"""A run's numbers, a line for each step."""
ASIDE, BEGUN, GONE = ".old_", ".tmp_", ".gone_"
"""A former checkpoint of a step that is saved again, one that is being written, and one that is being removed."""
REMOVAL_S = 2.0


def begin(root: Path, step: int) -> Path:
    """An empty folder beside the checkpoints, for one to be written into."""
    temporary = root / f"{BEGUN}global_step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def remove(folder: Path) -> None:
    """Remove a folder into which others may still be writing. What they write later is removed by the next start."""
    ends = time.monotonic() + REMOVAL_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < ends:
        time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)


def publish(root: Path, step: int, facts: Mapping[str, Any], moves: Callable[[], None] = lambda: None) -> None:
    """Seal the folder that was begun, and make it ``global_step_N`` and the newest; one of that name makes way."""
    temporary, final, old = (root / f"{prefix}global_step_{step}" for prefix in (BEGUN, "", ASIDE))
    seal(temporary, {"step": step, **facts}, moves)
    moves()
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    os.replace(temporary, final)
    sync_folder(root)
    track(root, step)
    shutil.rmtree(old, ignore_errors=True)


def track(root: Path, step: int) -> None:
    """Name the newest checkpoint in verl's tracker file."""
    replace_text(root / TRACKER, str(step))
    sync_folder(root)


def clean(root: Path) -> None:
    """Undo what a killed save left: a half is removed, and a checkpoint that had made way for it returns."""
    for path in [*root.glob(f"{BEGUN}global_step_*"), *root.glob(f"{GONE}global_step_*")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in [*root.glob(f"{ASIDE}global_step_*")]:
        final = root / path.name.removeprefix(ASIDE)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, final)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state))


def read_state(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError for a folder that is not a checkpoint."""
    path = folder / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE}: not a checkpoint of this project, or an incomplete one")
    with open(path, encoding="utf-8", opener=opener) as file:
        return json.load(file)


def complete(root: Path) -> list[Path]:
    """Sealed checkpoints, oldest first."""
    return [folder for _, folder in numbered(root)]


def numbered(root: Path) -> list[tuple[int, Path]]:
    """Sealed checkpoints with their steps, oldest first."""
    return [(step, folder) for step, folder in named(root) if (folder / MANIFEST).is_file()]


def named(root: Path) -> list[tuple[int, Path]]:
    """Folders named as checkpoints are, oldest first, whatever they hold."""
    found = [(int(match[1]), folder) for folder in root.glob("global_step_*") if (match := STEP.fullmatch(folder.name))]
    return sorted((step, folder) for step, folder in found if folder.is_dir())


def checked(folder: Path, family: str | None, step: int | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all as they were sealed. Raises Damaged for another one, for one of another
    step than ``step``, and for one of another family of runs."""
    facts = facts_of(folder)
    if family is not None and facts.get("family") != family:
        raise Damaged(
            f"another run saved it ({facts.get('family')}, and this is {family}): resume it by resume_from_path"
        )
    if step is not None and facts["step"] != step:
        raise Damaged(f"it is of step {facts['step']}")
    verify(folder)
    for path in folder.rglob("*.pt"):
        names = foreign_names(path)
        if names:
            raise Damaged(f"{path.relative_to(folder)} is a pickle that would call {', '.join(names)}: it is not read")
    return facts


def newest_valid(root: Path, family: str | None) -> tuple[Path | None, dict[str, str]]:
    """The newest checkpoint that is whole and of this family of runs, and what is wrong with each newer one."""
    refused: dict[str, str] = {}
    for step, folder in reversed(named(root)):
        try:
            checked(folder, family, step)
        except (Damaged, OSError) as error:
            refused[folder.name] = str(error)
        else:
            return folder, refused
    return None, refused


def prune(root: Path, keep_last: int | None, best: Collection[int] = (), whole: int | None = None) -> None:
    """Remove the oldest ones beyond ``keep_last``, except those of the ``best`` steps and the newest that is whole: that of step
    ``whole``, which was sealed just now, or without one the newest whose files are as they were sealed."""
    found = numbered(root)
    if keep_last is None or len(found) <= keep_last:
        return
    newest = root / f"global_step_{whole}" if whole is not None else newest_valid(root, None)[0]
    for step, folder in found[:-keep_last]:
        if step not in best and folder != newest:
            # renamed first: a kill leaves no half of it under its name. On NFS, one with an open file stays for the next start
            os.replace(folder, gone := root / f"{GONE}{folder.name}")
            shutil.rmtree(gone, ignore_errors=True)


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one at a time, however large it is; one that is still written is left out."""
    if path.is_file():
        with open(path, "rb", opener=opener) as file:
            yield from (line for line in file if line.endswith(b"\n"))
