"""Base class of policy and critic worker groups: awaitable calls with deadlines."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from marl.batch.build import pad_rows
from marl.batch.rows import rows_of
from marl.cluster.failures import group_failed
from marl.config.deadlines import Deadlines, Phase
from marl.types import Metrics
from marl.utils.deadlines import wait_with_deadline
from marl.utils.marks import marks_of
from marl.utils.ragged import pick, row_lengths
from marl.utils.spans import Span, placed, union_seconds

logger = logging.getLogger(__name__)
T = TypeVar("T")

PING_S = 5.0
"""Seconds in which a process answers that does nothing else."""


class WorkerGroup:
    """verl's worker group behind ``workers``, or one worker in this process (``marl.cluster.local``)."""

    kind: ClassVar[str]
    warned_of_fewer = False

    def __init__(
        self, name: str, config: Any, workers: Any, pool: str, deadlines: Deadlines, lock: asyncio.Lock | None = None
    ) -> None:
        """``lock`` is that of the pool: groups of one pool share processes and their collectives. Ray does not promise that
        every rank takes two groups' calls in the same order, and a deadline begins when the processes are free."""
        self.name, self.config, self.workers, self.pool, self.deadlines = name, config, workers, pool, deadlines
        self.in_turn: AbstractAsyncContextManager = lock or nullcontext()
        self.busy: list[Span] = []
        """Spans of the current step in which a rank, or a server, computed; by this process's ``time.monotonic()``."""

    @cached_property
    def ranks_per_row(self) -> int:
        """Ranks that split a row among them."""
        return 1

    async def start_workers(self) -> None:
        """Load the model in every rank."""
        await self._all("loading its model", self.workers.init_model, phase=Phase.start)

    async def save(self, folder: Path, beside: bool = True) -> list[Path]:
        """Let every rank write its state ``beside`` the next step, or at once. Returns the marks that they leave when they have."""
        await self._all(f"saving to {folder}", self.workers.save_checkpoint, str(folder), beside, phase=Phase.save)
        return marks_of(folder, self.workers.world_size)

    async def load(self, folder: Path) -> None:
        await self._all(f"loading {folder}", self.workers.load_checkpoint, str(folder), None, False, phase=Phase.save)

    async def hosts_without(self, path: Path) -> list[str]:
        """Hosts of ranks that do not see a file."""
        async with self.in_turn:
            ranks = asyncio.gather(*self.workers.host_without(str(path)))
            return [host for host in await self._wait("looking for its folder", ranks, Phase.save) if host]

    async def check_alive(self) -> None:
        """Raise GroupFailed where the process of a rank has ended; one that is busy does not answer in time, and lives."""
        pings = [asyncio.ensure_future(actor.__ray_ready__.remote()) for actor in self.workers.workers]
        ended = (await asyncio.wait(pings, timeout=PING_S))[0] if pings else ()
        for error in [ping.exception() for ping in ended]:
            if isinstance(error, RayError):
                raise group_failed(f"{self.kind} {self.name!r}", "writing its part of a checkpoint", error) from error

    def stop(self) -> None:
        """End the workers."""
        for actor in self.workers.workers:
            ray.kill(actor)

    def mini_batches(self, rows: TensorDict, wanted: int, settings: Any) -> TensorDict:
        """Rows that divide among mini-batches and ranks, with the keys that verl needs to optimise over them."""
        size = len(rows)
        count = even_mini_batches(size, wanted, self.workers.world_size)
        self._warn_of_fewer(count, wanted, size)
        rows, _ = self._for_workers(rows, count)
        tu.assign_non_tensor(
            rows,
            global_batch_size=size / count,  # of the real rows: what padding adds weighs nothing
            mini_batch_size=len(rows) // count,
            epochs=settings.ppo_epochs,
            seed=settings.data_loader_seed,
            dataloader_kwargs={"shuffle": settings.shuffle},
        )
        return rows

    def _warn_of_fewer(self, count: int, wanted: int, size: int) -> None:
        if count < wanted and not self.warned_of_fewer:
            self.warned_of_fewer = True
            logger.warning(
                "%s %r: %d rows over %d ranks make %d mini-batches, not %d, so that a step has fewer updates (said once); "
                "controller.pack_turns=false makes more rows, a larger ppo_mini_batch_size wants fewer",
                *(self.kind, self.name, size, self.workers.world_size, count, wanted),
            )

    def _for_workers(
        self, rows: TensorDict, mini_batches: int = 1, **settings: Any
    ) -> tuple[TensorDict, list[int] | None]:
        """Rows that divide among the ranks and mini-batches, with what verl's engines ask for, and the order in which they are
        balanced; None where they stay as they are."""
        rows, order = pad_rows(rows, mini_batches * self.workers.world_size).copy(), None
        ranks = self.workers.world_size // self.ranks_per_row
        if ranks > 1 and self.config.trainer.balance_batch:
            order = balanced_order(row_lengths(rows["input_ids"]).tolist(), ranks, mini_batches)
            rows = rows_of(rows, order)
        if settings:
            tu.assign_non_tensor(rows, **settings)
        return rows, order

    async def _all(self, what: str, method: Any, *arguments: Any, phase: Phase = Phase.update) -> None:
        """Call a method of every rank and wait for all of them."""
        async with self.in_turn:
            await self._wait(what, asyncio.gather(*method(*arguments)), phase)

    async def _call(self, phase: str, method: Any, rows: TensorDict) -> TensorDict:
        """Give every rank its part of the rows and wait for verl's future without blocking the loop."""
        async with self.in_turn:
            began = time.monotonic()
            future = method(rows)
            outputs = await self._wait(f"computing {phase}", asyncio.gather(*future.futures))
            within = began, time.monotonic()
        output = outputs[0] if len(outputs) == 1 else future.get()  # verl's joins several, row by row
        metrics = tu.get(output, "metrics")
        ranks = zip(*(np.ravel(metrics[key]).tolist() for key in ("worker_seconds", "worker_ended")), strict=True)
        self._count_busy(ranks, within)
        return output

    def _count_busy(self, ranks: Iterable[tuple[float, float]], within: Span) -> None:
        """Record each rank's busy span from its duration and wall-clock end; wall clocks are comparable across nodes."""
        offset = time.time() - time.monotonic()
        self.busy += [placed(seconds, ended - offset, within) for seconds, ended in ranks]

    async def _wait(self, what: str, work: Awaitable[T], phase: Phase = Phase.update) -> T:
        seconds, key = self.deadlines[phase]
        try:
            return await wait_with_deadline(seconds, f"{self.kind} {self.name!r}: {what}", work, key)
        except RayError as error:
            raise group_failed(f"{self.kind} {self.name!r}", what, error) from error


def balanced_order(lengths: Sequence[int], ranks: int, mini_batches: int = 1) -> list[int]:
    """An order of rows whose consecutive parts, one a rank, have equally many rows and nearly equally many tokens
    (``trainer.balance_batch``). A mini-batch is the same stretch of every part, and keeps its rows."""
    size = len(lengths) // (ranks * mini_batches)
    order = list(range(len(lengths)))
    for mini_batch in range(mini_batches):
        starts = [(rank * mini_batches + mini_batch) * size for rank in range(ranks)]
        rows = [row for start in starts for row in range(start, start + size)]
        shares = get_seqlen_balanced_partitions([lengths[row] for row in rows], ranks, equal_size=True)
        for start, share in zip(starts, shares, strict=True):
            order[start : start + size] = [rows[place] for place in share]
    return order


def in_given_order(column: Tensor, order: Sequence[int] | None, size: int) -> Tensor:
    """The first rows of a worker's output, in the order before :func:`balanced_order`."""
    if order is None and len(column.offsets()) - 1 == size:  # type: ignore[attr-defined]
        return column
    return pick(column, torch.arange(size) if order is None else torch.as_tensor(order).argsort()[:size])


async def check_alive(groups: Iterable[WorkerGroup]) -> None:
    """Raise GroupFailed for the first group with a rank whose process has ended."""
    await asyncio.gather(*(group.check_alive() for group in groups))


def throughput(groups: Iterable[WorkerGroup], turns: float, step: Span) -> Metrics:
    """A step's length, and the share of it in which neither a server nor a worker computed."""
    seconds = step[1] - step[0]
    busy = union_seconds((span for group in groups for span in group.busy), step)
    return {
        "timing_s/step": seconds,
        "perf/turns_per_second": turns / seconds,
        "perf/busy_seconds": busy,
        "perf/overhead_share": 1.0 - busy / seconds,
    }


def even_mini_batches(rows: int, wanted: int, ranks: int) -> int:
    """Number of mini-batches: ``wanted``, or fewer where one of them would hold only padding."""
    for count in range(min(wanted, max(1, rows // ranks)), 1, -1):
        size = -(-rows // (count * ranks)) * ranks
        if (count - 1) * size < rows:
            return count
    return 1


def flatten_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """verl's lists of numbers of micro-batches and ranks, each to one number by verl's rule."""
    numbers = {key: value for key, value in metrics.items() if key != "worker_ended"}
    return {key: float(value) for key, value in reduce_metrics(numbers).items() if np.ndim(value) == 0}
