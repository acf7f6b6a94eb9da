"""Balance of ranks by tokens (``trainer.balance_batch``): an order of rows for the workers alone; nobody else sees it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from marl.utils.ragged import pick


def balanced_order(lengths: Sequence[int], ranks: int, mini_batches: int = 1) -> list[int]:
    """An order of rows whose consecutive parts, one a rank, have equally many rows and nearly equally many tokens. A mini-batch is
    the same stretch of every part, and keeps its rows."""
    size = len(lengths) // (ranks * mini_batches)
    order = list(range(len(lengths)))
    for mini_batch in range(mini_batches):
        starts = [(rank * mini_batches + mini_batch) * size for rank in range(ranks)]
        own = [row for start in starts for row in range(start, start + size)]
        shares = get_seqlen_balanced_partitions([lengths[row] for row in own], ranks, equal_size=True)
        for start, share in zip(starts, shares, strict=True):
            order[start : start + size] = [own[place] for place in share]
    return order


def as_before(column: Tensor, order: Sequence[int] | None, size: int) -> Tensor:
    """The first rows of a worker's output, in the order before :func:`balanced_order`."""
    if order is None and len(column.offsets()) - 1 == size:  # type: ignore[attr-defined]
        return column
    return pick(column, torch.arange(size) if order is None else torch.as_tensor(order).argsort()[:size])
