"""Rollout dumps with what every turn was trained on, written in the background."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.report import dump
from marl.report.dump import Numbers
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


def turn_numbers(batch: JointBatch, credit_ERA: Tensor) -> list[list[Numbers]]:
    """The numbers of every episode's turns, in their order.

    ``reward`` is what the credit scheme gave (an advantage, for a scheme of that kind); ``return`` what the turn was compared
    by, or its critic fitted to; ``advantage`` the mean over its tokens. Of a critic that values tokens, ``value`` and
    ``return`` are those of the turn's first token. Tokens that a rollout correction rejected do not count. A turn that is not trained has no advantage, and no critic values it.
    """
    spoke, trained = batch.spoken_ERA, batch.trained_ERA
    columns = {
        "reward": table(credit_ERA, spoke),
        "return": table(batch.returns_ERA, spoke if batch.critic_data.values_ERA is None else trained)
        or of_tokens(batch, "returns", first=True),
        "advantage": of_tokens(batch, "advantages"),
        "value": table(batch.critic_data.values_ERA, trained) or of_tokens(batch, "values", first=True),
    }
    return [[{key: column.get(cell) for key, column in columns.items()} for cell in cells] for cells in batch.cells]


def table(x_ERA: Tensor | None, mask_ERA: Tensor) -> dict[int, float]:
    """A grid's numbers by cell."""
    if x_ERA is None:
        return {}
    cells = mask_ERA.flatten().nonzero()[:, 0]
    return dict(zip(cells.tolist(), x_ERA.flatten()[cells].tolist(), strict=True))


def of_tokens(batch: JointBatch, key: str, first: bool = False) -> dict[int, float]:
    """A column's mean over each turn's tokens, or its value at the first of them, by cell."""
    found: dict[int, float] = {}
    for rows in batch.rows.values():
        index_T = rows["turn_index"].values()
        kept_T = (index_T >= 0) & rows["response_mask"].values().bool()
        if key not in rows or not kept_T.any():
            continue
        cells_D, turn_T = index_T[kept_T].unique(return_inverse=True)
        x_T = rows[key].values()[kept_T].double()
        count_D = torch.bincount(turn_T)
        if first:
            starts_D = torch.zeros_like(count_D).scatter_reduce(
                0, turn_T, torch.arange(len(turn_T)), "amin", include_self=False
            )
            x_D = x_T[starts_D]
        else:
            x_D = torch.zeros(len(cells_D), dtype=torch.double).index_add(0, turn_T, x_T) / count_D
        found |= dict(zip(cells_D.tolist(), x_D.tolist(), strict=True))
    return found
