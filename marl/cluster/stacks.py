"""Stacks of all processes of a run, for whoever asks why something did not answer in time.

Each process writes its threads' stacks into its own log when it gets a signal; that needs neither the interpreter's lock nor the
event loop, which a hung process holds. A process that is stopped, or in the kernel, is named with its state.
"""

import faulthandler
import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from marl.cluster.failures import is_a_hang
from marl.cluster.processes import TITLES, processes_where
from marl.utils.run_mark import MARK

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR2
ANSWER_S, POLL_S = 2.0, 0.05
NODES_S = 20.0
"""Deadline for the other machines."""
FOLDER = "stacks"
LONGEST = 1 << 18


def listen() -> None:
    """Write the stacks of all threads to this process's error log at ``SIGNAL``. Ray runs it at each worker's start, a session in
    the driver."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)


LISTEN = f"{listen.__module__}.{listen.__name__}"


@contextmanager
def stacks_of_a_hang(folder: Path) -> Iterator[None]:
    """After a missed deadline, leave the stacks in ``folder`` while everybody is still there, and name them in the
    error."""
    try:
        yield
    except Exception as error:
        if is_a_hang(error):
            with suppress(OSError):  # of a full disk; the fault itself counts
                error.add_note(f"stacks of all processes: {dump(folder / FOLDER)}")
        raise


def dump(folder: Path) -> Path:
    """Write a file of stacks for this process, and one for each other process of the run."""
    into = folder / time.strftime("%Y%m%d-%H%M%S")
    into.mkdir(parents=True, exist_ok=True)
    with open(into / f"driver_{os.getpid()}.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    mark = os.environ.get(MARK)
    if mark is None:
        return into
    for name, text in {**stacks_here(mark), **stacks_elsewhere(mark)}.items():
        (into / f"{name}.txt").write_text(text)
    return into


def stacks_here(mark: str, host: str = "") -> dict[str, str]:
    """Stacks of this machine's Python processes, by name and pid."""
    asked = [Asked(process) for process in processes_where(mark.__eq__)]
    asked = [one for one in asked if one.is_python]
    ends = time.monotonic() + ANSWER_S
    for one in asked:
        one.ask()
    while time.monotonic() < ends and not all(one.has_answered() for one in asked):
        time.sleep(POLL_S)
    return {f"{host}{one.name}_{one.process.pid}": one.told() for one in asked}


class Asked:
    """One process, and the part of its log that it writes when it is asked."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.name, self.state, self.log = process, "gone", "gone", Path()
        self.is_python = self.listens = False
        self.size = self.start = 0
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            self.name = re.sub(r"\W+", "_", " ".join(words[:1])).strip("_")[-60:]
            self.state = process.status()
            self.is_python = words[:1] != [] and (words[0].startswith(TITLES) or "python" in Path(words[0]).name)
            self.listens = catches(process.pid, SIGNAL)
            self.log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
            self.size = self.start = self.log.stat().st_size

    def ask(self) -> None:
        with suppress(psutil.Error):
            if self.listens:
                self.process.send_signal(SIGNAL)

    def has_answered(self) -> bool:
        """True once its log has grown and stands still, and for a process that cannot answer."""
        if not self.listens or self.state == psutil.STATUS_STOPPED:
            return True
        with suppress(OSError):
            before, self.size = self.size, self.log.stat().st_size
            return self.start < self.size == before
        return True

    def told(self) -> str:
        with suppress(OSError, psutil.Error):
            if self.listens and self.log.stat().st_size > self.start:
                with open(self.log, "rb") as file:
                    file.seek(self.start)
                    return file.read(LONGEST).decode(errors="replace")
        why = f"no answer within {ANSWER_S:g} s" if self.listens else "it does not listen"
        return f"{why}; state: {self.state}\n"


def catches(pid: int, wanted: int) -> bool:
    """True if a process has a handler for a signal: without one, the signal would end it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (wanted - 1) & 1)
    return False


def stacks_elsewhere(mark: str) -> dict[str, str]:
    """The same of the cluster's other machines, as far as they answer."""
    if not ray.is_initialized():
        return {}
    try:
        own = ray.get_runtime_context().get_node_id()
        others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
        return told_by(others, mark)
    except Exception as error:  # whatever is wrong with the cluster: the fault itself counts
        logger.warning("no stacks of other machines: %s: %s", type(error).__name__, error)
        return {}


def told_by(nodes: Sequence[dict], mark: str) -> dict[str, str]:
    task = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            mark, f"{node['NodeManagerAddress']}_"
        )
        for node in nodes
    ]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=NODES_S) if asked else ([], [])
    return {name: text for ref in done for name, text in ray.get(ref).items()}
