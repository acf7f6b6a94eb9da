"""verl's data-parallel dispatch, slicing whole columns instead of single rows, and without a thread pool for every call."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from tensordict import TensorDict
from verl.single_controller.base.decorator import collect_lazy_compute_data_proto
from verl.single_controller.base.worker_group import WorkerGroup

from marl.cluster.workers.parcel import Parcel
from marl.utils.ragged import consecutive


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
