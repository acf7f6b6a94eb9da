"""Marks that ranks leave in a folder when their part of it is written: they write in the background, maybe on another host."""

import json
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path

POLL_S = 0.02


def marks_of(folder: Path, ranks: int) -> list[Path]:
    return [folder / f".written_rank_{rank}" for rank in range(ranks)]


def leave(folder: Path, rank: int, error: str) -> None:
    """``error``: empty where all went well."""
    mark = folder / f".written_rank_{rank}"
    beside = mark.with_name(f"{mark.name}.tmp")
    beside.write_text(json.dumps({"host": socket.gethostname(), "error": error}))
    os.replace(beside, mark)


def wait_for(marks: Collection[Path], seconds: float, key: str) -> None:
    """Wait for all marks and remove them. Raises OSError for a rank that failed, TimeoutError for one that left no mark."""
    ends = time.monotonic() + seconds
    for mark in marks:
        while not mark.exists():
            if time.monotonic() > ends:
                raise TimeoutError(
                    f"{mark.parent}: rank {mark.name.rsplit('_', 1)[1]} has not written its part within {seconds:g} s; if it only "
                    f"needs longer, raise {key}; on a host with another file system, set trainer.default_local_dir to a shared "
                    "folder"
                )
            time.sleep(POLL_S)
        found = json.loads(mark.read_text())
        if found["error"]:
            raise OSError(f"{mark.parent}, written on {found['host']}: {found['error']}")
    for mark in marks:
        mark.unlink()
