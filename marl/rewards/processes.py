"""Reward functions in processes that can be killed: a hang or crash fails only its own text."""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble import ProcessExpired, ProcessPool

START_S = 120.0
"""Deadline for a process to start and to load the file of a custom function."""


class RewardError(RuntimeError):
    """Raised for a text that could not be scored. ``kind`` names its counter: timeouts, deaths or errors."""

    def __init__(self, message: str, kind: str = "errors") -> None:
        super().__init__(message)
        self.kind = kind


class RewardUnavailable(RewardError):
    """Raised where no scorer was available: an infrastructure failure, not the text's."""


class LeanProcess(SpawnProcess):
    """Spawned, not forked, because the driver has Ray's threads; and without the driver's main module.

    Python would import that module again in every child: with torch and Ray, six seconds and half a gigabyte each.
    It skips the ``__main__`` of a package, so one is put in its place.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main: Any = sys.modules["__main__"]
        spec, main.__spec__ = main.__spec__, ModuleSpec("marl.__main__", None)
        try:
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            main.__spec__ = spec


class LeanContext(SpawnContext):
    Process = LeanProcess  # type: ignore[assignment]


class Processes:
    """Up to ``count`` processes, started with the first call; ``prepare`` runs once in each."""

    def __init__(
        self, count: int, timeout_s: float, key: str = "", prepare: Callable[[], object] | None = None
    ) -> None:
        self.count, self.timeout_s, self.key, self.prepare = count, timeout_s, key, prepare
        # no more calls than processes: one that was handed over has begun, and its deadline with it
        self._free = asyncio.Semaphore(count)
        self._pool: ProcessPool | None = None

    async def run(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float | None = None
    ) -> Any:
        """Runs ``function(**arguments)`` in a process. Raises RewardError where it raises, hangs or dies, and
        RewardUnavailable where no process is available."""
        call, timeout_s = pickle.dumps((function, dict(arguments))), timeout_s or self.timeout_s
        async with self._free:
            error, result = await self._ask_twice(call, timeout_s)
        if error:
            raise RewardError(error)
        return pickle.loads(result)

    async def _ask_twice(self, call: bytes, timeout_s: float) -> tuple[str, bytes]:
        """A process may be killed by the machine, or have died between two calls; a text that kills it does so again."""
        pool = self._running()
        try:
            return await self._ask(pool, call, timeout_s)
        except BrokenProcessPool:
            self._drop(pool)
        except ProcessExpired:
            pass
        try:
            return await self._ask(self._running(), call, timeout_s)
        except BrokenProcessPool as broken:
            raise RewardUnavailable(f"its processes cannot be started: {broken}", "deaths") from None
        except ProcessExpired as died:
            raise RewardError(f"its process died with exit code {died.exitcode}, twice", "deaths") from None

    async def _ask(self, pool: ProcessPool, call: bytes, timeout_s: float) -> tuple[str, bytes]:
        future = asyncio.wrap_future(pool.schedule(answer, (call,), timeout=timeout_s))
        try:
            done, _ = await asyncio.wait([future], timeout=timeout_s + START_S)
            if not done:
                self._drop(pool)
                raise RewardUnavailable(f"no process took it within {timeout_s + START_S:g} s", "deaths")
            return future.result()
        except TimeoutError:
            limit = self.key if timeout_s == self.timeout_s else "its deadline"
            raise RewardError(
                f"it took longer than {limit}={timeout_s:g} s; its process was killed", "timeouts"
            ) from None
        finally:
            future.cancel()

    def _running(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            self._pool = ProcessPool(self.count, initializer=begin, initargs=(self.prepare,), context=LeanContext())
        return self._pool

    def _drop(self, pool: ProcessPool) -> None:
        if self._pool is pool:
            self._pool = None
        pool.stop()
        pool.join()

    def stop(self) -> None:
        """End the processes, whatever they do."""
        if self._pool is not None:
            self._drop(self._pool)


def begin(prepare: Callable[[], object] | None) -> None:
    """The first thing that a process does."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    if prepare is not None:
        with contextlib.suppress(Exception):  # raised again, and named, by every call
            prepare()


def end_with_parent() -> None:
    """A driver that is killed cannot stop its processes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def answer(call: bytes) -> tuple[str, bytes]:
    """Run in the process: the error or the result.

    Calls and results cross as bytes and errors as text: an object that the other side cannot unpickle would end the pool.
    """
    try:
        function, arguments = pickle.loads(call)
        return "", pickle.dumps(function(**arguments))
    except BaseException as error:  # sys.exit() too is a fault of this answer alone
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})", b""
