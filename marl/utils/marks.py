"""Marks that ranks leave in a folder when their part of it is written: they write in the background, maybe on another host."""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from marl.utils.deadlines import DeadlinePassed

logger = logging.getLogger(__name__)

POLL_S = 0.02
STILL_S = 60.0
"""A rank that writes shows within this time, over a network file system too."""
RESERVED_BYTES = 4096
LONGEST_ERROR = 500


def marks_of(folder: Path, ranks: int) -> list[Path]:
    return [folder / f".written_rank_{rank}" for rank in range(ranks)]


def reserve(folder: Path, rank: int) -> None:
    """Take the disk space of a rank's mark, so that it can be left on a full disk."""
    _beside(folder, rank).write_text(" " * RESERVED_BYTES)


def leave(folder: Path, rank: int, error: str) -> None:
    """``error``: empty where all went well."""
    beside = _beside(folder, rank)
    with open(beside, "r+" if beside.exists() else "w") as file:  # blanks that stay after it are none of JSON's
        file.write(json.dumps({"host": socket.gethostname(), "error": error[:LONGEST_ERROR]}))
    os.replace(beside, beside.with_suffix(""))


def _beside(folder: Path, rank: int) -> Path:
    return folder / f".written_rank_{rank}.tmp"


def wait_for(
    marks: Collection[Path],
    seconds: float,
    key: str,
    run_is_ending: Callable[[], bool] = lambda: False,
    rank_is_gone: Callable[[], bool] = lambda: False,
    *,
    moves: Callable[[], None] = lambda: None,
) -> None:
    """Wait for all marks and remove them; call ``moves`` with every look. Raises OSError for a rank that failed, and TimeoutError for
    one that left no mark: where the time is over or the run is ending by an error, as soon as nothing has grown for a while (a disk
    that is only slow is waited for), or at once where a rank's process has ended."""
    ends, waiting, warned = time.monotonic() + seconds, list(marks), False
    growth = Growth({mark.parent for mark in marks}, still := min(STILL_S, seconds))
    while waiting := [mark for mark in waiting if not _is_left(mark)]:
        moves()
        late = f"{waiting[0].parent}: rank {waiting[0].name.rsplit('_', 1)[1]} has not written its part"
        still_for = growth.still_seconds()
        if time.monotonic() > ends:
            if still_for > still:
                raise DeadlinePassed(
                    f"{late} within {seconds:g} s, and nothing was written for {still_for:.0f} s; if it only needs longer, raise "
                    f"{key}; on a host with another file system, set trainer.default_local_dir to a shared folder"
                )
            if not warned:
                warned = True
                logger.warning("%s within %g s (%s); its files still grow, and are waited for", late, seconds, key)
        if rank_is_gone():
            raise TimeoutError(f"{late}, and the process of a rank has ended")
        if run_is_ending() and still_for > still:
            raise TimeoutError(f"{late}, and nothing was written for {still:g} s while the run was ending")
        time.sleep(POLL_S)
    moves()
    for mark in marks:
        mark.unlink()


def _is_left(mark: Path) -> bool:
    """Raises OSError for the mark of a rank that failed."""
    if not mark.exists():
        return False
    found = json.loads(mark.read_text())
    if found["error"]:
        raise OSError(f"{mark.parent}, written on {found['host']}: {found['error']}")
    return True


class Growth:
    """Looks at folders, now and then, for whether their files grow."""

    def __init__(self, folders: Collection[Path], still: float) -> None:
        """``still``: the seconds without growth that matter; looks are a sixtieth of that apart."""
        self.folders, self.interval = folders, still / 60
        self.sizes: dict[Path, int] | None = None
        self.grown = self.looked = 0.0

    def still_seconds(self) -> float:
        """Time since they were last seen to change; the first look counts as a change."""
        now = time.monotonic()
        if now - self.looked > self.interval:
            self.looked, sizes = now, self._sizes()
            if sizes != self.sizes:
                self.sizes, self.grown = sizes, now
        return now - self.grown

    def _sizes(self) -> dict[Path, int]:
        sizes = {}
        for folder in self.folders:
            with suppress(FileNotFoundError):  # a file that gets its name meanwhile
                for path in folder.rglob("*"):
                    sizes[path] = path.stat().st_size
        return sizes
