"""Runs of a sweep side by side: tasks of Ray that hold their CPUs and GPUs, each with a run in a process of its own."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from marl.cluster.access import connect, token_required
from marl.config.errors import ConfigError
from marl.config.sweeps import run_words
from marl.utils.endings import ended_by_sigterm
from marl.utils.run_mark import MARK, marked

PR_SET_PDEATHSIG = 1
ASKED_S = 60.0
"""Seconds after which the machines are looked at again: one may have left the cluster."""
SHOWN = 300
"""Letters of a failed run's last line."""


@dataclass(frozen=True)
class Task:
    folder: Path
    words: list[str]
    cpus: float
    gpus: float

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def run_tasks(
    tasks: Mapping[int, Task], words: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[int, Exception | None]]:
    """Number and error of each task, as they end; ``words``: the sweep's own command line."""
    if not tasks:
        return
    with cluster():
        started, waiting = time.monotonic(), {}
        for index, task in tasks.items():
            if reason := too_large(task):
                yield index, ConfigError(reason)
                continue
            options = {"num_cpus": task.cpus, "num_gpus": task.gpus, "max_retries": 0, "name": task.folder.name}
            own = run_words(words, task.words)
            waiting[ray.remote(run_in_process).options(**options).remote(own, str(task.log), os.getcwd())] = index
        say(f"{len(waiting)} runs queued; logs are in {next(iter(tasks.values())).folder.parent}/*.log")
        try:
            while waiting:
                for reference, error in ended(waiting, tasks):
                    index = waiting.pop(reference)
                    said = "finished" if error is None else f"failed: {error}"
                    say(f"{tasks[index].folder.name}: {said}, {time.monotonic() - started:.0f} s after the start")
                    yield index, error
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)


def ended(waiting: Mapping[Any, int], tasks: Mapping[int, Task]) -> list[tuple[Any, Exception | None]]:
    """The first task that ends, with its error; where none does for a while, those that no machine has room for any more."""
    found, _ = ray.wait(list(waiting), num_returns=1, timeout=ASKED_S)
    if found:
        return [(reference, error_of(reference, tasks[waiting[reference]])) for reference in found]
    reasons = {reference: too_large(tasks[index]) for reference, index in waiting.items()}
    lost: list[tuple[Any, Exception | None]] = [
        (ref, RuntimeError(reason)) for ref, reason in reasons.items() if reason
    ]
    for reference, _ in lost:
        ray.cancel(reference, force=True)
    return lost


@contextmanager
def cluster() -> Iterator[None]:
    """The cluster of ``RAY_ADDRESS``, or one of this machine meanwhile; its processes carry a mark, by which the next run on the
    machine finds those of a killed sweep."""
    address = os.environ.get("RAY_ADDRESS", "local")
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    with marked() as mark, token_required() if address == "local" else nullcontext():
        variables = {"PYTHONPATH": path, MARK: mark}
        arguments: dict[str, Any] = {"address": address, "runtime_env": {"env_vars": variables}}
        connect(arguments | ({"include_dashboard": False} if address == "local" else {}))
        try:
            with ended_by_sigterm():
                yield
        finally:
            ray.shutdown()


def too_large(task: Task) -> str:
    """Reason that no machine of the cluster has room for a task; empty for one that fits."""
    machines = [
        (node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]
    ]
    if any(task.cpus <= cpus and task.gpus <= gpus for cpus, gpus in machines):
        return ""
    found = ", ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in machines)
    return (
        f"{task.folder.name} needs {task.cpus:g} CPUs and {task.gpus:g} GPUs of one machine; the cluster's have {found}: set "
        "hydra.launcher.num_cpus and num_gpus, or leave hydra/launcher=marl_ray out"
    )


def run_in_process(words: Sequence[str], log: str, folder: str) -> int:
    """Train one run and return its exit code. The process ends with the worker that waits for it."""
    os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
    # the run starts a Ray session of its own, on what this task holds
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    with open(log, "ab") as file:
        command = [sys.executable, "-m", "marl.main", *words]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
        )
        return process.wait()


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def error_of(reference: Any, task: Task) -> Exception | None:
    try:
        code = ray.get(reference)
    except RayError as error:
        return RuntimeError(f"{task.folder.name}: {str(error).splitlines()[0]}; the same command continues it")
    if code == 0:
        return None
    lines = task.log.read_text(errors="replace").split("\n") if task.log.is_file() else []
    last = next((line for line in reversed(lines) if line.strip()), "")[:SHOWN]
    message = f"exit code {code}: {last} ({task.log})"
    return ConfigError(message.replace("configuration error: ", "")) if code == 2 else RuntimeError(message)
