"""A run that a kill or an error ended: the same command again goes on with it (``trainer.resume_mode=auto``), in its folder."""

import fcntl
import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import open_dict

from marl.config.identity import comparable, refused
from marl.utils import folders
from marl.utils.manifest import replace_text

logger = logging.getLogger(__name__)

STAMPED = re.compile(r"\d{8}-\d{6}-\w{4}-seed\d+")
"""A folder that ``${new_run:}`` named."""
RUN, LOCK, FINISHED = "run.json", ".lock", "finished"
LENGTH = re.compile(r"trainer\.total_(training_steps|epochs)")
BEGUN = "ledger/*"
"""Files of a run that was killed before its first checkpoint."""
NEWEST = 20
"""Folders beside a new one that are looked at."""


def go_on_with(config: Any, folder: Path, identity: Mapping[str, Any]) -> Path:
    """The folder of the newest unfinished run with these settings, which the configuration then names; or else the new one."""
    found = unfinished(folder, identity) if config.trainer.resume_mode == "auto" else None
    if found is None:
        return folder
    logger.warning("continuing %s, which did not finish; trainer.resume_mode=disable begins a new run", found)
    with open_dict(config):
        for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
            path = config.trainer.get(key)
            if path and Path(path).is_relative_to(folder):
                config.trainer[key] = str(found / Path(path).relative_to(folder))
    return found


def unfinished(folder: Path, identity: Mapping[str, Any]) -> Path | None:
    """The newest unfinished run beside a new, time-stamped folder; None if its settings are others, which are named."""
    if STAMPED.fullmatch(folder.name) is None or (folder / RUN).exists():
        return None
    seed = folder.name.rsplit("-", 1)[1]
    beside = sorted((path for path in folder.parent.glob(f"*-{seed}") if STAMPED.fullmatch(path.name)), reverse=True)
    for path in beside[:NEWEST]:
        saved = json.loads((path / RUN).read_text()) if (path / RUN).is_file() else None
        left = folders.complete(path) or [*path.glob(BEGUN)]
        if saved is None or FINISHED in saved or not left or is_running(path):
            continue
        different = settings_that_differ(saved, identity)
        if not different:
            return path
        shown = "; ".join(f"{key}: {before} then, {now} now" for key, (before, now) in [*different.items()][:5])
        logger.warning("%s did not finish, and is not continued: it has other settings (%s)", path, shown)
        return None
    return None


def settings_that_differ(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (saved, new)} of what a resumed run may not change, and of its length."""
    new = json.loads(json.dumps(new, default=str))
    before, now = comparable(saved), comparable(new)
    lengths = {key: (before.get(key), now.get(key)) for key in now if LENGTH.fullmatch(key)}
    return refused(saved, new, ()) | {key: pair for key, pair in lengths.items() if pair[0] != pair[1]}


def is_running(folder: Path) -> bool:
    """True if another process holds the folder."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or a file system without them
        return False
    return False


def mark_finished(folder: Path) -> None:
    """Note in ``run.json`` that the run came to its end: the same command then begins a new one."""
    record = json.loads((folder / RUN).read_text())
    replace_text(folder / RUN, json.dumps(record | {FINISHED: time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
