"""Rollout dumps, written in the background."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from marl.batch.joint import JointBatch
from marl.report import dump
from marl.report.turn_numbers import turn_numbers
from marl.types import Episode
from marl.utils.background import Background

CreditOf = Callable[[JointBatch], Tensor]
"""A batch's credit [E, R, A] of every turn."""


class DumpWriter(Background):
    """Writes ``<folder>/<step>.jsonl`` in a thread, one dump at a time, so that at most one earlier step's episodes stay in memory.

    Without a folder nothing is written.
    """

    def __init__(self, folder: str | None, seconds: float = math.inf, key: str = "") -> None:
        super().__init__("a rollout dump", None, seconds, key)
        self.folder = folder

    async def write(self, episodes: Sequence[Episode], step: int, batch: JointBatch, credit: CreditOf) -> None:
        """Start writing the episodes with what their turns were trained on; the caller must not modify them afterwards."""
        if self.folder:
            await self.flush()
            self.start(write_trained, episodes, step, self.folder, batch, credit(batch))

    async def write_played(self, episodes: Sequence[Episode], step: int) -> None:
        """Start writing episodes whose turns were not credited."""
        if self.folder:
            await self.flush()
            self.start(dump.write, episodes, step, self.folder)


def write_trained(episodes: Sequence[Episode], step: int, folder: str, batch: JointBatch, credit_ERA: Tensor) -> Path:
    return dump.write(episodes, step, folder, turn_numbers(batch, credit_ERA))
