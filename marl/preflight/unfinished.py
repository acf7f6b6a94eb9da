"""A run that a kill or an error ended: the same command again goes on with it (``trainer.resume_mode=auto``), in its folder."""

import json
import logging
import re
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import open_dict

from marl.config.identity import comparable, refused
from marl.report.runs import FINISHED, RUN, is_running
from marl.utils import folders
from marl.utils.manifest import replace_text
from marl.utils.plain_files import opener

logger = logging.getLogger(__name__)

STAMPED = re.compile(r"\d{8}-\d{6}-\w{4}(|-.+)")
"""A folder that ``${new_run:}`` named, and what the user's own pattern adds, such as ``-seed0``."""
LENGTH = re.compile(r"trainer\.total_(training_steps|epochs)")
COMPARED = re.compile(rf"{LENGTH.pattern}|resources\.(placement|pools)(\..+)?")
"""Keys that a resumed run may change, and one that nobody asked to resume must share: its length, and its numbers of ranks."""
BEGUN = "ledger/*"
"""Files of a run that was killed before its first checkpoint."""
NEWEST = 20
"""Folders beside a new one that are looked at."""


def go_on_with(config: Any, folder: Path, identity: Mapping[str, Any]) -> Path:
    """The folder of the newest unfinished run with these settings, which the configuration then names; or else the new one."""
    goes_on = config.trainer.resume_mode == "auto" and not config.trainer.get("val_only")
    found = unfinished(folder, identity) if goes_on else None
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
    """The newest unfinished run with these settings beside a new, time-stamped folder. Where there are only others, the first
    differences of the newest are named."""
    stamped = STAMPED.fullmatch(folder.name)
    if stamped is None or (folder / RUN).exists():
        return None
    named = ((path, STAMPED.fullmatch(path.name)) for path in folder.parent.glob("*"))
    beside = sorted((path for path, found in named if found and found[1] == stamped[1]), reverse=True)
    interrupted = ((path, record) for path in beside if (record := record_of_interrupted(path)) is not None)
    others = {}
    for path, record in islice(interrupted, NEWEST):
        others[path] = settings_that_differ(record, identity)
        if not others[path]:
            return path
    for path, different in [*others.items()][:1]:
        shown = "; ".join(f"{key}: {before} then, {now} now" for key, (before, now) in [*different.items()][:5])
        logger.warning(
            "%s did not finish, and is not continued: it has other settings (%s); to continue it with them, set "
            "trainer.default_local_dir=%s and name in trainer.resume_changes those that may change",
            *(path, shown, path),
        )
    return None


def record_of_interrupted(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a run that left something to continue from, did not come to its end and is not running; or else None."""
    if not (folder / RUN).is_file() or not (folders.complete(folder) or any(folder.glob(BEGUN))):
        return None
    record = identity_in(folder, "is not continued")
    return None if record is None or FINISHED in record or is_running(folder) else record


def record_of_finished(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a run that came to its end; None where there is none, or a damaged one."""
    record = identity_in(folder)
    return record if record and FINISHED in record else None


def identity_in(folder: Path, so: str = "") -> dict[str, Any] | None:
    """``run.json`` of a folder; None for one that cannot be read, with a warning where that has a consequence, ``so``."""
    try:
        with open(folder / RUN, encoding="utf-8", opener=opener) as file:
            record: dict[str, Any] = json.load(file)
        comparable(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if so:
            logger.warning("%s %s: its %s cannot be read (%s: %s)", folder, so, RUN, type(error).__name__, error)
        return None
    return record


def settings_that_differ(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (saved, new)} of what a resumed run may not change, and of its length and ranks."""
    return differing(saved, new, COMPARED, ())


def other_results(
    saved: Mapping[str, Any], new: Mapping[str, Any], changes: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    """{key: (saved, new)} of what would make a finished run another one; packages may be of other versions by now."""
    return differing(saved, new, LENGTH, ("versions", *changes))


def differing(
    saved: Mapping[str, Any], new: Mapping[str, Any], also: re.Pattern[str], changes: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    """Everything that a resumed run may not change, and all keys of the pattern ``also`` that differ."""
    new = json.loads(json.dumps(new, default=str))
    before, now = comparable(saved), comparable(new)
    pairs = {key: (before.get(key), now.get(key)) for key in sorted({*before, *now}) if also.fullmatch(key)}
    return refused(saved, new, changes) | {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def mark_finished(folder: Path) -> None:
    """Note in ``run.json`` that the run came to its end: the same command then begins a new one."""
    record = json.loads((folder / RUN).read_text())
    replace_text(folder / RUN, json.dumps(record | {FINISHED: time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
