"""Picking rows out of a policy's batch. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marl.batch.joint import CriticRows, JointBatch
from marl.utils.ragged import pick_rows

if TYPE_CHECKING:
    from tensordict import TensorDict


def rows_of(rows: TensorDict, index: Sequence[int], silent: int = 0) -> TensorDict:
    """These rows in this order; the last ``silent`` of them with empty masks."""
    picked = pick_rows(rows, torch.as_tensor(index))
    for key in ("response_mask", "loss_mask", "value_mask"):
        if silent and key in picked:
            picked[key].values()[int(picked[key].offsets()[-1 - silent]) :] = 0
    return picked


def drop_rejected(batch: JointBatch) -> None:
    """Drop what a rollout correction rejected: a turn without a remaining token is not trained, even if others share its
    row, and a row without a trained turn is removed; other turns train their remaining tokens. Critic rows must be rebuilt
    afterwards."""
    kept_ERA = torch.zeros_like(batch.trained_ERA)
    for name, rows in list(batch.rows.items()):
        kept = [i for i, mask in enumerate(rows["response_mask"].unbind()) if mask.any()]
        if not kept:
            del batch.rows[name]
            continue
        if len(kept) < len(rows):
            rows = batch.rows[name] = rows_of(rows, kept)
        index = rows["turn_index"].values()
        kept_ERA.view(-1)[index[(index >= 0) & rows["response_mask"].values().bool()]] = True
        rejected = (index >= 0) & ~kept_ERA.flatten()[index.clamp(min=0)]
        rows["turn_index"] = torch.nested.nested_tensor_from_jagged(
            index.masked_fill(rejected, -1), rows["turn_index"].offsets()
        )
    if not torch.equal(kept_ERA, batch.trained_ERA):
        batch.critic_data.value_rows = CriticRows()  # they line up with removed rows
    batch.trained_ERA = kept_ERA


def drop_turns(batch: JointBatch, dropped_ERA: Tensor) -> None:
    """Exclude turns from the update: mask them in shared rows, drop rows of their own."""
    for rows in batch.rows.values():
        index = rows["turn_index"]
        kept_T = (index.values() >= 0) & ~dropped_ERA.flatten()[index.values().clamp(min=0)]
        mask_T = rows["response_mask"].values() * kept_T
        rows["response_mask"] = rows["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask_T, index.offsets())
    drop_rejected(batch)


def rows_to_check(rows: TensorDict, num_agents: int, count: int, seed: int) -> list[int]:
    """Indices of the longest row, of a row of every agent, and of as many random ones as make ``count``."""
    lengths_B, agents_B = rows["input_ids"].offsets().diff().tolist(), agents_of(rows, num_agents)
    order = [i for i, agent in enumerate(agents_B) if agent >= 0]
    if not order:
        return []
    random.Random(seed).shuffle(order)
    longest = max(order, key=lambda i: lengths_B[i])
    by_agent = {agents_B[i]: i for i in reversed(order)} | {agents_B[longest]: longest}
    chosen = list(dict.fromkeys([*by_agent.values(), *order]))
    return sorted(chosen[: max(count, len(by_agent))])


def agents_of(rows: TensorDict, num_agents: int) -> list[int]:
    """Each row's agent, by its place in the team; -1 for a row without a generated token."""
    index = rows["turn_index"]
    row_T = torch.repeat_interleave(torch.arange(len(rows)), index.offsets().diff())
    cells_B = torch.full((len(rows),), -1).scatter_reduce(0, row_T, index.values(), "amax")
    return torch.where(cells_B >= 0, cells_B % num_agents, -1).tolist()
