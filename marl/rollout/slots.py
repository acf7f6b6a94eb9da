"""Keys and values of the rows that a model reads: a slot a row, written in place, so that nothing is copied to grow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import CallableProxyType, proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

Segment = list[tuple[Tensor, ...]]
"""Keys and values of consecutive tokens, [heads, tokens, dim] of each layer."""


class Slots(Cache):
    """A cache of any model whose layers keep keys and values; it learns their shapes when they are first written."""

    def __init__(self, rows: int = 0, capacity: int = 0) -> None:
        super().__init__(layer_class_to_replicate=partial(SlotLayer, proxy(self)))
        self.rows, self.capacity = rows, capacity

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for so many rows of so many tokens; what was written stays."""
        if rows > self.rows or capacity > self.capacity:
            self.rows = max(rows, 2 * self.rows) if rows > self.rows else self.rows
            self.capacity = max(capacity, self.capacity)
            for layer in self.layers:
                layer.allocate(*layer.stored)

    def aim(self, positions_BN: Tensor, width: int) -> None:
        """Places of the next tokens of the first B rows, and the number of tokens that attention sees of each."""
        self.positions_BN, self.width = positions_BN, width
        self._places: dict[int, Tensor] = {}

    def places(self, heads: int) -> Tensor:
        """The same as indices into [rows * heads * capacity]."""
        if heads not in self._places:
            device = self.positions_BN.device
            rows_B11 = torch.arange(len(self.positions_BN), device=device)[:, None, None]
            lanes_BH1 = rows_B11 * heads + torch.arange(heads, device=device)[:, None]
            self._places[heads] = (lanes_BH1 * self.capacity + self.positions_BN[:, None]).flatten()
        return self._places[heads]

    def move(self, source: int, to: int, length: int) -> None:
        """Copy a row's first tokens into another row."""
        for layer in self.layers:
            for kept in layer.stored:
                kept[to, :, :length] = kept[source, :, :length]

    def fill(self, rows: Sequence[int], start: int, segment: Segment) -> None:
        """Write tokens that were read before, the same into each of these rows, which ascend, as far as there is room."""
        places = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else list(rows)
        while len(self.layers) < len(segment):
            self.layers.append(SlotLayer(proxy(self)))
        for layer, (keys, values) in zip(self.layers, segment, strict=True):
            if not layer.is_initialized:
                layer.allocate(keys[None], values[None])
            for kept, given in zip(layer.stored, (keys, values), strict=True):
                known = given[:, : self.capacity - start]
                kept[places, :, start : start + known.shape[1]] = known

    def take(self, row: int, start: int, end: int) -> Segment:
        """A copy of the tokens from ``start`` to ``end`` of a row."""
        return [tuple(kept[row, :, start:end].clone() for kept in layer.stored) for layer in self.layers]


class SlotLayer(DynamicLayer):
    def __init__(self, slots: CallableProxyType[Slots]) -> None:
        """``slots``: by weak reference, for a cycle would hold the tensors until the garbage collector comes by."""
        super().__init__()
        self.slots = slots
        self.stored: tuple[Tensor, ...] = ()

    def get_seq_length(self) -> int:
        """0 before the first update, even where stored prefixes are already in place."""
        return 0 if self.keys is None else super().get_seq_length()

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Room as of the slots, shaped like these; takes over what was stored."""
        shape = self.slots.rows, self.slots.capacity
        # zeros: what attention masks is multiplied by 0, which an accidental infinity survives
        fresh = tuple(x.new_zeros(shape[0], x.shape[1], shape[1], x.shape[3]) for x in (keys, values))
        for new, old in zip(fresh, self.stored, strict=False):
            new[: old.shape[0], :, : old.shape[2]] = old
        self.stored, self.is_initialized = fresh, True
        self.dtype, self.device = keys.dtype, keys.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.allocate(key_states, value_states)
        rows, heads = key_states.shape[:2]
        places = self.slots.places(heads)
        for kept, new in zip(self.stored, (key_states, value_states), strict=True):
            kept.view(-1, kept.shape[-1]).index_copy_(0, places, new.reshape(-1, new.shape[-1]))
        self.keys, self.values = (kept[:rows, :, : self.slots.width] for kept in self.stored)
        return self.keys, self.values
