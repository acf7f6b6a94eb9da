"""Writing in a thread beside the caller's work, one thing at a time."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)


class Background:
    """Writes one thing after another in a thread. The error of one is raised by the next call.

    Leaving ``async with`` waits for the last one; if the block itself failed, its error is raised and the other is logged.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = ThreadPoolExecutor(1, name.replace(" ", "_"))
        self.pending: asyncio.Future[Any] | None = None

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin some work; what came before must have been waited for by :meth:`flush`."""
        self.pending = asyncio.wrap_future(self.thread.submit(work, *arguments))

    async def flush(self) -> None:
        """Wait for the work. Raises its error."""
        if self.pending is not None:
            await asyncio.wait([self.pending])  # cancelled here, it leaves the work pending
            done, self.pending = self.pending, None
            done.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None:
            return await self.flush()
        try:
            await self.flush()
        except Exception as failed:
            logger.error("%s was not written: %s: %s", self.name, type(failed).__name__, failed)
