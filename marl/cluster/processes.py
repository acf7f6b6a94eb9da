"""The processes of a run, on every machine: they carry a mark in their environment, which their own children inherit.

What a run leaves behind, stopped processes included, is found by it and ended: at the run's own end, or by the next run where the
driver was killed.
"""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from marl.utils import segments
from marl.utils.run_mark import MARK, owner_lives

PATIENCE_S = 5.0
"""Time that processes have to end by themselves."""
SESSIONS = Path("/tmp/ray")
TITLES = ("ray::", "VLLM::", "sglang::")
"""Names that Python's processes take: Ray's actors, and what the engines start."""
YOUNG_S = 60.0
"""A socket may be made before anybody listens to it."""


def processes_where(wanted: Callable[[str], bool]) -> list[psutil.Process]:
    """Processes of this machine with such a mark, without this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK)
            if mark and process.pid != os.getpid() and wanted(mark):
                found.append(process)
    return found


def end_left(mark: str) -> None:
    """End the processes of a session of Ray that is over: those that do not end by themselves are killed. This process's own
    children (a tracker's, the reward's) are left to whoever started them; orphans that became its children, as all do where it is a
    container's first process, are known by their titles."""
    ends = time.monotonic() + PATIENCE_S
    while (left := lost_by_ray(mark)) and time.monotonic() < ends and not all(map(is_stopped, left)):
        time.sleep(0.05)
    kill(left)


def lost_by_ray(mark: str) -> list[psutil.Process]:
    own = set(psutil.Process().children(recursive=True))
    return [process for process in processes_where(mark.__eq__) if process not in own or is_rays(process)]


def is_rays(process: psutil.Process) -> bool:
    """True for one of Ray's actors, or what an engine started."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline()[:1]).startswith(TITLES)
    return False


def end_orphans() -> None:
    """End what runs left whose drivers were killed, and remove their shared memory and sockets."""
    kill(processes_where(lambda mark: mark.count("/") == 4 and not owner_lives(mark)))
    segments.remove_of_the_dead()
    for raylet in SESSIONS.glob("session_*/sockets/raylet"):
        with suppress(OSError):
            if raylet.stat().st_uid == os.getuid() and is_deaf(raylet):
                shutil.rmtree(raylet.parent)


def is_young(file: Path) -> bool:
    """True for a file whose user may be about to open it."""
    return time.time() - file.stat().st_mtime < YOUNG_S


def is_deaf(listener: Path) -> bool:
    """True for a socket's file to which nobody has listened for a while."""
    if is_young(listener):
        return False
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(listener))
        except ConnectionRefusedError:
            return True
    return False


def is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return True


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill them, and last of all those that tidy up after them (Python's trackers of shared memory)."""
    trackers = []
    for process in processes:
        with suppress(psutil.Error):
            if "resource_tracker" in " ".join(process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
    _, left = psutil.wait_procs(trackers, timeout=1.0 if trackers else 0.0)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
