"""Shared memory of a run's processes, noted while they live: what a killed one leaves behind is removed by its name.

Containers may share ``/dev/shm`` and not see one another's processes: there, a segment that nobody here has open may still be
another run's. So only what a run has noted is removed, once that run's driver, which was in this container, is gone.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import quote, unquote

import psutil

from marl.utils.run_mark import MARK, owner_lives

SHARED_MEMORY = Path("/dev/shm")
NOTES = Path(f"/tmp/marl-segments-{os.getuid()}")
KINDS = ("psm_*", "*-cpushm*", "verl_weights_*")
"""Segments of Python's ``multiprocessing``, with which vLLM's processes talk; of vLLM's ranks on a CPU; of verl's weight transfer."""


def note(*names: str) -> None:
    """Note segments that this process or its children have made; what was noted before and is gone is forgotten."""
    mark = os.environ.get(MARK)
    if mark is None:
        return
    record = NOTES / f"{quote(mark, safe='')}@{os.getpid()}"
    with suppress(OSError):  # of a full disk: a run needs no notes
        NOTES.mkdir(mode=0o700, exist_ok=True)
        if not is_own(NOTES):
            return
        lines = dict.fromkeys(line for line in [*read(record), *map(identified, names)] if is_there(line))
        draft = NOTES / f".{os.getpid()}"
        draft.write_text("\n".join(lines))
        draft.replace(record)


def note_mapped() -> None:
    """Note the segments that this process and its children have open: the channels between an engine's processes."""
    own = psutil.Process()
    note(*{name for process in [own, *own.children(recursive=True)] for name in mapped_by(process.pid)})


def remove(mark: str) -> None:
    """Remove what the processes of a run that is over have noted, unless somebody has it open: that is left for the next run."""
    records = NOTES.glob(f"{quote(mark, safe='')}@*") if is_own(NOTES) else ()
    for record in records:
        with suppress(OSError):
            left = [line for line in read(record) if not removed(line)]
            if not left:
                record.unlink()


def remove_of_the_dead() -> None:
    """Remove what runs have left whose drivers were killed on this machine."""
    for mark in {unquote(record.name.rpartition("@")[0]) for record in NOTES.glob("*@*")}:
        if not owner_lives(mark):
            remove(mark)


def is_own(folder: Path) -> bool:
    """True for a folder that this user made: another one's notes would name what is not to be removed."""
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def identified(name: str) -> str:
    """A segment's name with what tells it from a later one of the same name."""
    with suppress(OSError):
        return f"{name} {(SHARED_MEMORY / name).stat().st_ino}"
    return name


def is_there(line: str) -> bool:
    name, _, number = line.partition(" ")
    return number.isdecimal() and "/" not in name and is_ours(name) and identified(name) == line


def is_ours(name: str) -> bool:
    return any(fnmatch(name, kind) for kind in KINDS)


def removed(line: str) -> bool:
    """Remove a noted segment. False if it is still there."""
    if is_there(line):
        segment = SHARED_MEMORY / line.partition(" ")[0]
        if segment.stat().st_uid != os.getuid() or is_open(segment):
            return False
        segment.unlink()
    return True


def read(record: Path) -> Iterable[str]:
    return record.read_text().splitlines() if record.exists() else []


def mapped_by(pid: int) -> set[str]:
    """Names of the segments that a process has mapped."""
    with suppress(OSError):
        mapped = (Path(line.split()[-1]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line)
        return {path.name for path in mapped if path.parent == SHARED_MEMORY and is_ours(path.name)}
    return set()


def is_open(segment: Path) -> bool:
    """True if a process, whose maps can be read, has the segment."""
    return any(segment.name in mapped_by(process.pid) for process in psutil.process_iter())
