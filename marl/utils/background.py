"""Writing in a thread beside the caller's work, one thing at a time."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at those who do the work."""
Watch = Callable[[], Awaitable[None]]
"""Raises where the work cannot come to its end."""


class Background:
    """Writes one thing after another in a thread. The error of one is raised by the next call.

    Leaving ``async with`` waits for the last one. If the block itself failed, its error is logged before that wait and raised
    after it; the work's own is logged.
    """

    def __init__(self, name: str, watch: Watch | None = None) -> None:
        """``watch`` is asked while somebody waits: with its error the work is given up."""
        self.name, self.watch = name, watch
        self.thread = ThreadPoolExecutor(1, name.replace(" ", "_"))
        self.pending: asyncio.Future[Any] | None = None
        self.failing = threading.Event()
        """Set when the block has failed: the work need not wait long for others, which may have failed too."""
        self.hopeless = threading.Event()
        """Set by an error of ``watch``: the work need not wait any more."""

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin some work; what came before must have been waited for by :meth:`flush`."""
        self.pending = asyncio.wrap_future(self.thread.submit(work, *arguments))

    async def flush(self) -> None:
        """Wait for the work. Raises its error, or that of ``watch``."""
        if self.pending is None:
            return
        try:
            await self._watched(self.pending)
        finally:
            if self.pending.done():  # cancelled here, it leaves the work pending
                done, self.pending = self.pending, None
        done.result()

    async def _watched(self, pending: asyncio.Future[Any]) -> None:
        interval = LOOK_S if self.watch else None
        while not (await asyncio.wait([pending], timeout=interval))[0]:
            assert self.watch is not None
            try:
                await self.watch()
            except Exception:
                self.hopeless.set()
                await asyncio.wait([pending])
                pending.exception()  # of what was given up
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None:
            return await self.flush()
        self.failing.set()
        if self.pending is not None and not self.pending.done():
            told = f"{type(error).__name__}: {error}"
            logger.error("the run ends, as soon as %s that was begun is written or given up: %s", self.name, told)
        try:
            await self.flush()
        except Exception as failed:
            logger.error("%s was not written: %s: %s", self.name, type(failed).__name__, failed)
