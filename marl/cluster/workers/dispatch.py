"""verl's data-parallel dispatch, slicing whole columns instead of single rows."""

from functools import partial
from typing import Any

from tensordict import TensorDict
from verl.single_controller.base.decorator import collect_lazy_compute_data_proto, dispatch_nd_compute
from verl.single_controller.base.worker_group import WorkerGroup

from marl.utils.ragged import consecutive


def rows_by_rank(mesh: str) -> dict[str, Any]:
    """For ``register(dispatch_mode=…)``: every rank of this mesh gets its part of the rows."""
    return {"dispatch_fn": partial(_to_ranks, mesh), "collect_fn": partial(collect_lazy_compute_data_proto, mesh)}


def _to_ranks(mesh: str, group: WorkerGroup, rows: TensorDict) -> tuple[tuple, dict]:
    places = group._dispatch_info  # verl's cache of what its workers say
    if mesh not in places:
        places[mesh] = group._query_dispatch_info(mesh)
    count = max(places[mesh]) + 1
    return dispatch_nd_compute(places[mesh], count, group, parts_of(rows, count))


def parts_of(rows: TensorDict, count: int) -> list[TensorDict]:
    """Consecutive parts of equal size, each in one piece of memory. Raises ValueError for rows that do not divide."""
    size, rest = divmod(len(rows), count)
    if rest:
        raise ValueError(f"{len(rows)} rows do not divide among {count} ranks; pad them first")
    starts = range(0, len(rows), size)
    parts = [rows] if count == 1 else [consecutive(rows, start, start + size) for start in starts]
    return [part.consolidate() for part in parts]
