"""Rollout dumps, written in the background."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from marl.batch.joint import JointBatch
from marl.report import dump
from marl.report.turn_numbers import turn_numbers
from marl.types import Episode

logger = logging.getLogger(__name__)
CreditOf = Callable[[JointBatch], Tensor]
"""A batch's credit [E, R, A] of every turn."""


class DumpWriter:
    """Writes ``<folder>/<step>.jsonl`` in a thread, one dump at a time, so that at most one earlier step's episodes stay in memory.

    The error of a dump is raised by the next call. Leaving ``async with`` waits for the last dump; if the block itself failed,
    its error is raised and the dump's is logged. Without a folder nothing is written.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.thread = ThreadPoolExecutor(1, "dump_writer")
        self.pending: asyncio.Future[Path] | None = None

    async def write(self, episodes: Sequence[Episode], step: int, batch: JointBatch, credit: CreditOf) -> None:
        """Start writing the episodes with what their turns were trained on; the caller must not modify them afterwards."""
        if self.folder:
            await self.flush()
            writing = self.thread.submit(write_trained, episodes, step, self.folder, batch, credit(batch))
            self.pending = asyncio.wrap_future(writing)

    async def flush(self) -> None:
        """Wait until all is written. Raises the error of a dump that was not."""
        if self.pending is not None:
            await asyncio.wait([self.pending])  # cancelled here, it leaves the dump pending
            written, self.pending = self.pending, None
            written.result()

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
            logger.error("a rollout dump was not written: %s: %s", type(failed).__name__, failed)


def write_trained(episodes: Sequence[Episode], step: int, folder: str, batch: JointBatch, credit_ERA: Tensor) -> Path:
    return dump.write(episodes, step, folder, turn_numbers(batch, credit_ERA))
