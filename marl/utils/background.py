"""Writing in a thread beside the caller's work, one thing at a time."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from marl.utils.deadlines import DeadlinePassed
from marl.utils.threads import in_thread

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the work and at those who do it."""
Watch = Callable[[], Awaitable[None]]
"""Raises where the work cannot come to its end."""


class GivenUp(RuntimeError):
    """Raised in a thread: its work took too long, and may have been begun again."""


class Background:
    """Writes one thing after another in a thread. The error of one is raised by the next call.

    Leaving ``async with`` waits for the last one. If the block itself failed, its error is logged before that wait and raised
    after it; the work's own is logged.
    """

    def __init__(self, name: str, watch: Watch | None = None, seconds: float = math.inf, key: str = "") -> None:
        """``watch`` is asked while somebody waits: with its error the work is given up. So is work that does not :meth:`move` for
        ``seconds``, which ``key`` sets; a thread cannot be ended: one that a dead disk holds stays behind."""
        self.name, self.watch, self.seconds, self.key = name, watch, seconds, key
        self.pending: asyncio.Future[Any] | None = None
        self.moved, self.given_up = 0.0, False
        self.failing = threading.Event()
        """Set when the block has failed: the work need not wait long for others, which may have failed too."""
        self.hopeless = threading.Event()
        """Set by an error of ``watch``: the work need not wait any more."""

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin some work; what came before must have been waited for by :meth:`flush`."""
        self.move()
        self.pending = asyncio.wrap_future(in_thread(self.name.replace(" ", "_"), work, *arguments))

    def move(self) -> None:
        """Called by the work, again and again, as it gets on. Raises GivenUp in work that nobody waits for any more."""
        if self.given_up:
            raise GivenUp(f"{self.name} was given up")
        self.moved = time.monotonic()

    async def flush(self) -> None:
        """Wait for the work. Raises its error, that of ``watch``, or DeadlinePassed."""
        if self.pending is None:
            return
        try:
            await self._watched(self.pending)
        finally:
            if self.pending.done():  # cancelled here, it leaves the work pending
                done, self.pending = self.pending, None
        done.result()

    async def _watched(self, pending: asyncio.Future[Any]) -> None:
        while not (await asyncio.wait([pending], timeout=min(LOOK_S, self.seconds)))[0]:
            if time.monotonic() - self.moved > self.seconds:
                self.given_up = True
                raise DeadlinePassed(
                    f"nothing moved for {self.seconds:g} s while {self.name} was written: look at the disk; if it only needs longer, "
                    f"raise {self.key}"
                )
            try:
                await self.watch() if self.watch else None
            except Exception:
                self.hopeless.set()
                await asyncio.wait([pending], timeout=self.seconds if math.isfinite(self.seconds) else None)
                self.given_up = True
                if pending.done():
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
