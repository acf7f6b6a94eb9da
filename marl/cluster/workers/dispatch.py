"""verl's data-parallel dispatch, slicing whole columns instead of single rows, and without a thread pool for every call.

Rows travel as numpy arrays, which are faster to write and to read than a TensorDict in one piece of memory.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import collect_lazy_compute_data_proto
from verl.single_controller.base.worker_group import WorkerGroup
from verl.utils import tensordict_utils as tu

from marl.utils.ragged import consecutive, is_nested


def rows_by_rank(mesh: str) -> dict[str, Any]:
    """For ``register(dispatch_mode=…)``: every rank of this mesh gets its part of the rows."""
    return {"dispatch_fn": partial(_to_ranks, mesh), "collect_fn": partial(collect_lazy_compute_data_proto, mesh)}


def _to_ranks(mesh: str, group: WorkerGroup, rows: TensorDict) -> tuple[tuple, dict]:
    places = group._dispatch_info  # verl's cache of what its workers say
    if mesh not in places:
        places[mesh] = group._query_dispatch_info(mesh)
    return (for_workers(rows, places[mesh]),), {}


def for_workers(rows: TensorDict, places: Sequence[int]) -> list[Any]:
    """Every worker's argument: its part travels with the call, from where Ray moves a large one to its store; a part that several
    workers read is stored once."""
    parts = [Parcel(part) for part in parts_of(rows, max(places) + 1)]
    if len(parts) == len(places):
        return [parts[place] for place in places]
    stored = [ray.put(part) for part in parts]
    return [stored[place] for place in places]


def parts_of(rows: TensorDict, count: int) -> list[TensorDict]:
    """Consecutive parts of equal size. Raises ValueError for rows that do not divide."""
    size, rest = divmod(len(rows), count)
    if rest:
        raise ValueError(f"{len(rows)} rows do not divide among {count} ranks; pad them first")
    starts = range(0, len(rows), size)
    return [rows] if count == 1 else [consecutive(rows, start, start + size) for start in starts]


class Bits(NamedTuple):
    """A tensor in bfloat16, which numpy does not know."""

    values: np.ndarray


class Ragged(NamedTuple):
    """A nested tensor."""

    values: np.ndarray | Bits
    offsets: np.ndarray
    """The same object for all columns that share it."""
    ragged_dim: int


class Parcel:
    """Pickled rows, which arrive as a TensorDict of their own."""

    def __init__(self, rows: TensorDict) -> None:
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        known: dict[int, np.ndarray] = {}
        columns = {key: packed(value, known) for key, value in self.rows.items()}
        return unpacked, (columns, tuple(self.rows.batch_size))


def packed(column: Any, known: dict[int, np.ndarray]) -> Any:
    """An array, or two of a ragged column; settings as they are. ``known``: offsets that were packed before."""
    if not isinstance(column, torch.Tensor):
        return column
    if not is_nested(column):
        return array_of(column)
    offsets = column.offsets()  # type: ignore[attr-defined]
    return Ragged(array_of(column.values()), known.setdefault(id(offsets), offsets.numpy()), column._ragged_idx)  # type: ignore[attr-defined]


def array_of(values: torch.Tensor) -> np.ndarray | Bits:
    return Bits(values.view(torch.int16).numpy()) if values.dtype is torch.bfloat16 else values.numpy()


def tensor_of(array: np.ndarray | Bits) -> torch.Tensor:
    """A copy: Ray's arrays are read-only."""
    return torch.tensor(array.values).view(torch.bfloat16) if isinstance(array, Bits) else torch.tensor(array)


def unpacked(columns: dict[str, Any], batch_size: tuple[int, ...]) -> TensorDict:
    known: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    for key, column in columns.items():
        if isinstance(column, Ragged):
            offsets = known.setdefault(id(column.offsets), torch.tensor(column.offsets))
            tensors[key] = torch.nested.nested_tensor_from_jagged(
                tensor_of(column.values), offsets, jagged_dim=column.ragged_dim
            )
        elif isinstance(column, np.ndarray | Bits):
            tensors[key] = tensor_of(column)
        else:
            settings[key] = column
    return tu.assign_non_tensor(TensorDict(tensors, batch_size=batch_size), **settings)
