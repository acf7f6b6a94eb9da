"""Rows of different lengths as torch's jagged nested tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def jagged(lists: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """A nested tensor of these rows."""
    offsets = torch.from_numpy(np.cumsum([0, *map(len, lists)], dtype=np.int64))
    values = torch.tensor([x for row in lists for x in row], dtype=dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def dense(nested: Tensor) -> Tensor:
    """[B, T] with the rows at the left and zeros after them; T is the longest row's length.

    torch's own conversion pads to the sum of all lengths where the longest one is not cached.
    """
    mask_BT = inside(nested)
    return nested.values().new_zeros(mask_BT.shape).masked_scatter(mask_BT, nested.values())


def dense_to_jagged(x_BT: Tensor, nested: Tensor) -> Tensor:
    """The rows of a dense tensor, as long as those of a nested one."""
    return torch.nested.nested_tensor_from_jagged(x_BT[inside(nested)], offsets=nested.offsets())  # type: ignore[attr-defined]


def pick(nested: Tensor, index: Tensor) -> Tensor:
    """These rows in this order, copied. Unbinding the nested tensor would make a view of every row that it has."""
    offsets = nested.offsets()  # type: ignore[attr-defined]
    lengths = offsets.diff()[index]
    ends = lengths.cumsum(0)
    shift = offsets[index] - ends + lengths
    at = torch.arange(int(lengths.sum()), device=lengths.device) + shift.repeat_interleave(lengths)
    picked = torch.nn.functional.pad(ends, (1, 0))
    return torch.nested.nested_tensor_from_jagged(nested.values()[at], offsets=picked)


def inside(nested: Tensor) -> Tensor:
    """Mask [B, T] of the entries of a dense tensor that rows of a nested one fill."""
    lengths_B = nested.offsets().diff()  # type: ignore[attr-defined]
    return torch.arange(int(lengths_B.max()), device=lengths_B.device) < lengths_B[:, None]
