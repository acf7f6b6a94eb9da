"""Rows of different lengths as torch's jagged nested tensors. Picking and joining take whole columns, never row by row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict


class Bounds(NamedTuple):
    """Starts of the rows of a nested tensor, and the lengths of the shortest and of the longest."""

    offsets: Tensor
    shortest: int
    longest: int


def jagged(lists: Sequence[Sequence[float]], dtype: torch.dtype, offsets: Tensor | None = None) -> Tensor:
    """A nested tensor of these rows; ``offsets``: those of another column of as long rows, to share them."""
    if offsets is None:
        offsets = torch.from_numpy(np.cumsum([0, *map(len, lists)], dtype=np.int64))
    values = np.fromiter(chain.from_iterable(lists), torch.empty(0, dtype=dtype).numpy().dtype, int(offsets[-1]))
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets=offsets)


def dense(nested: Tensor) -> Tensor:
    """[B, T] with the rows at the left and zeros after them; T is the longest row's length.

    torch's own conversion pads to the sum of all lengths where the longest one is not cached.
    """
    mask_BT = inside(nested)
    return nested.values().new_zeros(mask_BT.shape).masked_scatter(mask_BT, nested.values())


def dense_to_jagged(x_BT: Tensor, nested: Tensor) -> Tensor:
    """The rows of a dense tensor, as long as those of a nested one."""
    return torch.nested.nested_tensor_from_jagged(x_BT[inside(nested)], offsets=nested.offsets())  # type: ignore[attr-defined]


def inside(nested: Tensor) -> Tensor:
    """Mask [B, T] of the entries of a dense tensor that rows of a nested one fill."""
    lengths_B = nested.offsets().diff()  # type: ignore[attr-defined]
    return torch.arange(int(lengths_B.max()), device=lengths_B.device) < lengths_B[:, None]


def is_nested(column: Any) -> bool:
    """True for nested tensors; columns of other objects know no such attribute."""
    return bool(getattr(column, "is_nested", False))


def row_lengths(nested: Tensor) -> Tensor:
    return nested.offsets().diff()  # type: ignore[attr-defined]


class Picked:
    """Rows to pick, in this order; columns that share their offsets share the work."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.known: dict[int, tuple[Tensor, Bounds]] = {}
        """Places of the picked numbers and the bounds of their rows, by the offsets that they are picked from."""

    def of(self, column: Tensor) -> Tensor:
        if not is_nested(column):
            return column[self.index]
        offsets = column.offsets()  # type: ignore[attr-defined]
        if id(offsets) not in self.known:
            self.known[id(offsets)] = self._places(offsets)
        places, bounds = self.known[id(offsets)]
        axis = column._ragged_idx - 1  # type: ignore[attr-defined]
        return with_bounds(column.values().index_select(axis, places), bounds, axis)  # type: ignore[attr-defined]

    def _places(self, offsets: Tensor) -> tuple[Tensor, Bounds]:
        lengths = offsets.diff()[self.index]
        ends = lengths.cumsum(0)
        shift = torch.repeat_interleave(offsets[self.index] - ends + lengths, lengths)
        return shift + torch.arange(len(shift), device=shift.device), bounds_of(lengths)


def pick(column: Tensor, index: Tensor) -> Tensor:
    """These rows of a nested or a dense tensor, in this order."""
    return Picked(index).of(column)


def pick_rows(rows: TensorDict, index: Tensor) -> TensorDict:
    """These rows of every column, in this order; what is no column stays as it is."""
    from tensordict import TensorDict  # heavy: a configuration is checked without it

    picked = Picked(index)
    columns = {key: picked.of(value) if value.shape else value for key, value in rows.items()}
    return TensorDict(columns, batch_size=[len(index)])


def consecutive(rows: TensorDict, start: int, end: int) -> TensorDict:
    """The rows [start, end) as views."""
    from tensordict import TensorDict

    found = {key: _consecutive(value, start, end) if value.shape else value for key, value in rows.items()}
    return TensorDict(found, batch_size=[end - start])


def _consecutive(column: Tensor, start: int, end: int) -> Tensor:
    if not is_nested(column):
        return column[start:end]
    axis, offsets = column._ragged_idx - 1, column.offsets()[start : end + 1]  # type: ignore[attr-defined]
    first, last = int(offsets[0]), int(offsets[-1])
    return with_lengths(column.values().narrow(axis, first, last - first), offsets.diff(), axis)  # type: ignore[attr-defined]


def joined(columns: Sequence[Tensor]) -> Tensor:
    """The rows of several nested tensors as one."""
    lengths = torch.cat([row_lengths(column) for column in columns])
    return with_lengths(torch.cat([column.values() for column in columns]), lengths)  # type: ignore[attr-defined]


def with_lengths(values: Tensor, lengths: Tensor, axis: int = 0) -> Tensor:
    """A nested tensor of rows that follow one another along an axis of these values.

    It knows its longest row, without which torch pads to the sum of all lengths.
    """
    return with_bounds(values, bounds_of(lengths), axis)


def bounds_of(lengths: Tensor) -> Bounds:
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    shortest, longest = (int(length) for length in lengths.aminmax()) if len(lengths) else (0, 0)
    return Bounds(offsets, shortest, longest)


def with_bounds(values: Tensor, bounds: Bounds, axis: int = 0) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(
        values, bounds.offsets, jagged_dim=axis + 1, min_seqlen=bounds.shortest, max_seqlen=bounds.longest
    )


def of_responses(values: Tensor, rows: TensorDict) -> Tensor:
    """Cut the jagged outputs of whole rows down to the responses; output t predicts token t + 1."""
    offsets = rows["responses"].offsets()
    lengths = offsets.diff()
    row_ends = rows["input_ids"].offsets()[1:]
    shift = torch.repeat_interleave(row_ends - 1 - offsets[1:], lengths)
    index = torch.arange(int(offsets[-1]), device=shift.device) + shift
    return torch.nested.nested_tensor_from_jagged(values.values()[index].float(), offsets=offsets)  # type: ignore[attr-defined]
