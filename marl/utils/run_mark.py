"""The mark that all processes of a run carry in their environment: whose they are, and whether that driver still lives."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "MARL_RUN"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def new_mark() -> str:
    """Names this process, so that others can tell whether it still lives: its host, pid and start; and one session of it."""
    return f"{own_name()}/{uuid.uuid4().hex[:8]}"


def own_name() -> str:
    return f"{place()}/{os.getpid()}/{start_of(os.getpid())}"


def place() -> str:
    """This host, and the process ids that are meant: a container has its own. Machines may have the same name, and their first
    ids have the same namespace; no two share a boot."""
    with suppress(OSError):
        return f"{socket.gethostname()}/{BOOT.read_text().strip()}:{os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()}/"


def start_of(pid: int) -> str:
    """Start of a process, by a clock that nobody sets; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def owner_lives(mark: str) -> bool:
    """True unless the driver that made this mark ran here and is gone."""
    where, pid, start = mark.rpartition("/")[0].rsplit("/", 2)
    return where != place() or (pid.isdecimal() and start_of(int(pid)) == start)


@contextmanager
def marked() -> Iterator[str]:
    """Mark all processes that are started meanwhile."""
    before, mark = os.environ.get(MARK), new_mark()
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before
