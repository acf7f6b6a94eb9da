"""A system's side of the benchmark: it waits for its turn before every step, and reports what the step took.

Each message is one line of JSON on standard output; what libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import psutil

from benchmarks.work import Work

SYSTEM = "MARL_BENCH_SYSTEM"
"""Environment variable that all processes of a system inherit: Ray's have other parents."""


class Stopped(Exception):
    """Raised in a system that has taken its last step."""


class Gate:
    def __init__(self) -> None:
        self.output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.parts: dict[str, float] = {}
        self.checksum: float | None = None

    def ready(self, checksum: float | None = None) -> None:
        """Report that the system is up, and the CPU seconds that it took. ``checksum``: of the parameters it starts with."""
        cpu, self.checksum = time.process_time() + sum(cpu_of_others().values()), checksum
        self._send(event="ready", cpu=cpu)

    def begin(self) -> None:
        """Wait for the turn, and start the clocks. Raises Stopped after the last one."""
        if sys.stdin.readline().strip() != "go":
            raise Stopped
        self.parts = {}
        self.others = cpu_of_others()
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def stop_clocks(self) -> None:
        """End the step. Counting the work afterwards costs the system nothing."""
        wall, own = time.perf_counter() - self.wall, time.process_time() - self.cpu
        after = cpu_of_others()
        others = sum(after.values()) - sum(self.others.values())
        self.took = {"cpu": own + others, "wall": wall, "processes": len(after)}

    def report(self, work: Work, checksum: float | None = None, **counters: float) -> None:
        """Send what :meth:`stop_clocks` measured, and whether the step changed the parameters; null for one that samples."""
        changed = None if checksum is None else checksum != self.checksum
        self.checksum = checksum
        self._send(event="step", **self.took, parts=self.parts, work=asdict(work), changed=changed, **counters)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count this process's CPU seconds within the block as a part of the step."""
        started = time.process_time()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.process_time() - started

    def _send(self, **message: Any) -> None:
        print(json.dumps(message), file=self.output, flush=True)


def cpu_of_others() -> dict[int, float]:
    """CPU seconds of the system's other processes so far, by process id; a process that has ended counts in its parent."""
    found = {os.getpid(): sum(os.times()[2:4])}  # of its own children that have ended
    for process in system_processes():
        with suppress(psutil.Error):  # it has ended meanwhile
            if process.pid != os.getpid():
                found[process.pid] = sum(process.cpu_times()[:4])  # user, system, and those of ended children
    return found


def system_processes() -> list[psutil.Process]:
    """Processes that carry the system's mark, and those that descend from them.

    Neither alone finds all of Ray's: a daemon's parent may be gone, and a worker's title overwrites its environment.
    """
    processes = list(psutil.process_iter(["ppid"]))
    known = {process.pid for process in processes if is_marked(process)}
    size = 0
    while size < len(known):
        size = len(known)
        known |= {process.pid for process in processes if process.info["ppid"] in known}
    return [process for process in processes if process.pid in known]


def is_marked(process: psutil.Process) -> bool:
    try:
        return process.pid == os.getpid() or process.environ().get(SYSTEM) == os.environ.get(SYSTEM, "")
    except psutil.Error:
        return False  # another user's, or it has ended meanwhile
