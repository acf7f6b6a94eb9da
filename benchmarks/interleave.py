"""Systems as child processes that take steps in turn: what the machine does to one, it does to all."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gate import SYSTEM

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
}
WARM_UP = 0
"""The round that is not measured; the others follow from 1 on."""


class SystemFailed(RuntimeError):
    """Raised for a system that ended or hung before it was told to stop."""


class Steps(Protocol):
    def step(self) -> dict[str, Any]:
        """Take a step and report it."""
        ...


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Rounds from the warm-up on, and who steps: each system opens a round in its turn."""
    for round in range(WARM_UP, rounds + 1):
        first = round % len(names)
        yield from ((round, name) for name in (*names[first:], *names[:first]))


def interleave(
    systems: Mapping[str, Steps], rounds: int, failed: Callable[[str, SystemFailed], None]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each step's round, system and report. A system that fails is told to ``failed``, and takes no more steps."""
    lost = set()
    for round, name in turns(list(systems), rounds) if systems else ():
        if name in lost:
            continue
        try:
            yield round, name, systems[name].step()
        except SystemFailed as error:
            lost.add(name)
            failed(name, error)


class Child:
    """A system in a process of its own. What it prints is kept in ``<folder>/<name>.log``."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, patience_s: float) -> None:
        self.name, self.log, self.patience_s = name, folder / f"{name}.log", patience_s
        environment = os.environ | ONE_THREAD | {SYSTEM: f"{name}-{os.getpid()}", "PYTHONPATH": os.getcwd()}
        with ExitStack() as files:
            log = files.enter_context(self.log.open("w"))
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.start: dict[str, Any] = {}

    def wait_ready(self) -> None:
        self.start = self._message()

    def step(self) -> dict[str, Any]:
        self._say("go")
        return self._message()

    def stop(self) -> None:
        """Let the system end its own processes; kill it if it does not."""
        try:
            self._say("stop")
            self.process.wait(60)
        except (SystemFailed, subprocess.TimeoutExpired):
            self.process.kill()
        self.process.wait()

    def _say(self, word: str) -> None:
        try:
            print(word, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def _message(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with self._deadline():
            for line in self.process.stdout:
                if line.startswith('{"event"'):
                    message: dict[str, Any] = json.loads(line)
                    return message
        raise self._ended()

    def _ended(self) -> SystemFailed:
        return SystemFailed(f"{self.name} ended, or took more than {self.patience_s:.0f} s for a step; see {self.log}")

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        timer = threading.Timer(self.patience_s, self.process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
