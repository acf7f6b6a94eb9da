"""Micro-batches of rows of like length, for verl's FSDP engines.

verl balances the work of its micro-batches, which mixes lengths, and pads the rows of each to the longest. Here rows are sorted
by length and cut where the token budget is spent; rows are moved column by column, where verl moves them one by one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import postprocess_batch_func

from marl.platform.shards import reshard
from marl.utils.ragged import consecutive, joined, pick, pick_rows, row_lengths


class SortedMicroBatches(FSDPEngine):
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """As verl's: the gradient of the whole mini-batch, and the outputs in the order of its rows."""
        self._count_tokens(data)
        keep = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        order, boundaries = self._cut(data)
        sorted_rows, last, steps = pick_rows(data, order), len(boundaries) - 2, []
        for number, (start, end) in enumerate(pairwise(boundaries)):
            rows = consecutive(sorted_rows, start, end)
            with torch.profiler.record_function(f"micro_batch{number}"):
                step = self._micro_batch_step(rows, loss_function, forward_only, is_last=number == last)
            if not keep:
                step.pop("model_output", None)
            steps.append(step)
        if forward_only:
            reshard(self.module)
        outputs = in_order([step.pop("model_output", {}) for step in steps], order)
        return postprocess_batch_func(steps, None, data) | {"model_output": outputs}

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """As verl's; weights that stay gathered after a forward pass are gathered once for all micro-batches."""
        if isinstance(self.module, FSDPModule) and not self.engine_config.reshard_after_forward:
            self.module.set_reshard_after_backward(is_last_micro_batch)
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch):
            yield

    def _count_tokens(self, data: TensorDict) -> None:
        """Note the numbers by which losses are normalised: tokens of all ranks, and ranks."""
        tokens = data["loss_mask"].sum().to(get_device_name())
        torch.distributed.all_reduce(tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)

    def _cut(self, data: TensorDict) -> tuple[Tensor, list[int]]:
        """Order of the rows, longest first, and the boundaries of their micro-batches."""
        lengths, order = row_lengths(data["input_ids"]).sort(descending=True, stable=True)
        budget = data["max_token_len_per_gpu"] * self.ulysses_sequence_parallel_size
        padded = not tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        fewest = len(cuts(lengths.tolist(), budget, padded)) - 1
        count = agreed_count(fewest, len(order), self.get_data_parallel_group())
        return order, even_cuts(lengths.tolist(), budget, padded, count)

    def _micro_batch_step(
        self, rows: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool, is_last: bool
    ) -> dict[str, Any]:
        if forward_only:
            with torch.no_grad():
                return self.forward_step(rows, loss_function=loss_function, forward_only=True)[1]
        with self._gradient_sync_context(is_last_micro_batch=is_last):
            loss, step = self.forward_step(rows, loss_function=loss_function, forward_only=False)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return step


def cuts(lengths: Sequence[int], budget: int, padded: bool) -> list[int]:
    """Boundaries of the fewest micro-batches of rows within a budget of tokens; ``lengths`` descend.

    ``padded``: a row counts as much as the longest of its micro-batch. A row beyond the budget is a micro-batch of its own.
    """
    sums, found = [0, *accumulate(lengths)], [0]
    while (start := found[-1]) < len(lengths):
        fit = budget // lengths[start] if padded else bisect_right(sums, sums[start] + budget) - 1 - start
        found.append(min(start + max(1, fit), len(lengths)))
    return found


def even_cuts(lengths: Sequence[int], budget: int, padded: bool, count: int) -> list[int]:
    """Boundaries of ``count`` micro-batches, no fewer than :func:`cuts` needs: within the least budget for which they suffice.

    verl takes the mean of some metrics over micro-batches, so that a small rest would weigh as much as all others.
    """
    enough = bisect_left(range(budget), True, key=lambda least: len(cuts(lengths, least, padded)) <= count + 1)
    return halved(cuts(lengths, enough, padded), count)


def halved(boundaries: Sequence[int], count: int) -> list[int]:
    """Boundaries of ``count`` micro-batches, by halving those of the most rows until there are as many."""
    parts = [(start - end, start) for start, end in pairwise(boundaries)]
    heapify(parts)
    while len(parts) < count:
        size, start = heappop(parts)
        half = -size // 2
        heappush(parts, (-half, start))
        heappush(parts, (size + half, start + half))
    return [*sorted(start for _, start in parts), boundaries[-1]]


def agreed_count(count: int, rows: int, group: Any) -> int:
    """The most micro-batches that any rank needs: FSDP gathers weights for each, so that all ranks must have as many."""
    numbers = torch.tensor([count, -rows], device=get_device_name())
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=group)
    most, fewest_rows = int(numbers[0]), -int(numbers[1])
    if most > fewest_rows:
        raise ValueError(
            f"one rank needs {most} micro-batches and another has {fewest_rows} rows: expected a row for each; raise "
            "ppo_max_token_len_per_gpu (actor_rollout_ref.actor or critic), or use fewer ranks"
        )
    return most


def in_order(outputs: Sequence[dict[str, Tensor]], order: Tensor) -> dict[str, Tensor]:
    """The micro-batches' outputs as one, in the order that the rows had before they were sorted."""
    places = order.argsort()
    return {key: pick(joined([output[key] for output in outputs]), places) for key in outputs[0]}
