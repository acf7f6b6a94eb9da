"""Adapters beside one model: each row of a batch is computed with its own, in one forward pass.

A layer keeps its weights and their names; what an adapter adds to its output is added by a hook, to that adapter's rows. The
products are PEFT's, in its order, and have a multiple of ``MIN_ROWS`` rows and at least ``MIN_RANK`` columns, so that an answer
does not depend on the rows beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from marl.platform.shapes import missing_rows

MIN_RANK = 2
"""A product with one column is a matrix times a vector, whose last bits depend on the number of rows."""
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


class Pair(NamedTuple):
    """An adapter's addition to a layer: ``scaling * B A x``, with B and A padded by zeros to ``MIN_RANK``."""

    down_RI: Tensor
    up_OR: Tensor
    scaling: float
    rank: int

    def __call__(self, x: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        added: Tensor = linear(linear(x, self.down_RI), self.up_OR) * self.scaling
        return added

    @classmethod
    def padded(cls, down: Tensor, up: Tensor, scaling: float) -> Self:
        rank = len(down)
        missing = max(0, MIN_RANK - rank)
        pad = torch.nn.functional.pad
        return cls(pad(down, (0, 0, 0, missing)), pad(up, (0, missing)), scaling, rank)

    def halves(self) -> tuple[Tensor, Tensor]:
        """A and B as they were put."""
        return self.down_RI[: self.rank], self.up_OR[:, : self.rank].contiguous()


Share = tuple[Tensor, Tensor]
"""The rows of a batch that are one adapter's; and the same, padded with the first row to a multiple of ``MIN_ROWS``."""


class AdapterBank:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.pairs: dict[str, dict[str, Pair]] = {}
        """By layer and adapter."""
        self.names: set[str] = set()
        self.shares: dict[str, Share] = {}
        """Rows of the batch that is computed, by adapter."""
        self.shape = (0, 0)
        """Rows and tokens of the pass that is computed, its padding included."""

    def put(self, name: str, weights: Mapping[str, Tensor], scaling: float) -> None:
        """Copy a whole adapter, new or in place of its former weights. Raises KeyError for a layer or half of a pair that is
        missing."""
        layers = {layer_of(key): None for key in weights}
        for layer in layers:
            missing = [layer + suffix for suffix in SUFFIXES if layer + suffix not in weights]
            if missing:
                raise KeyError(f"adapter {name!r}: the trainer sent no {missing[0]}")
        modules = {layer: self._layer(name, layer) for layer in layers}
        for known in self.pairs.values():
            known.pop(name, None)
        like = next(self.model.parameters())
        for layer, module in modules.items():
            down, up = (weights[layer + suffix].to(like.device, like.dtype, copy=True) for suffix in SUFFIXES)
            if layer not in self.pairs:
                module.register_forward_hook(self._hook(layer))
            self.pairs.setdefault(layer, {})[name] = Pair.padded(down, up, scaling)
        self.names.add(name)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The adapter that rows are computed with; nothing for one that was never put."""
        for layer, pairs in self.pairs.items():
            if name in pairs:
                yield from zip((layer + suffix for suffix in SUFFIXES), pairs[name].halves(), strict=True)

    def _layer(self, name: str, layer: str) -> torch.nn.Module:
        try:
            return self.model.get_submodule(layer)
        except AttributeError:
            raise KeyError(
                f"adapter {name!r}: the server's model has no layer {layer}; is its path the trainer's?"
            ) from None

    def _hook(self, layer: str) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self._added(layer, inputs[0], output)

        return add

    def _added(self, layer: str, x: Tensor, output: Tensor) -> Tensor:
        flat = x.dim() == 2
        if flat:
            x, output = self._in_rows(layer, x), self._in_rows(layer, output)
        for name, (rows, padded) in self.shares.items():
            if (pair := self.pairs[layer].get(name)) is not None:
                output[rows] = output[rows] + pair(x[padded])[: len(rows)]
        return output.flatten(0, 1) if flat else output

    def _in_rows(self, layer: str, x: Tensor) -> Tensor:
        """Tokens that the model has put one after another, by rows of the pass again. Raises ValueError for some of them alone, as an
        expert sees them."""
        if len(x) != self.shape[0] * self.shape[1]:
            raise ValueError(
                f"the adapters' layer {layer} sees {len(x)} of {self.shape[0]} x {self.shape[1]} tokens: the hf rollout cannot tell "
                "whose they are; leave it out of target_modules, or use vllm"
            )
        return x.unflatten(0, self.shape)

    @contextmanager
    def routed(self, adapters: Sequence[str | None]) -> Iterator[None]:
        """Compute row i with ``adapters[i]``, further rows and those of None with the model alone. Raises KeyError for an
        adapter that was never put."""
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(adapters):
            if name is not None:
                if name not in self.names:
                    raise KeyError(f"adapter {name!r}: expected one of {', '.join(sorted(self.names)) or 'none'}")
                rows.setdefault(name, []).append(row)
        self.shares = {name: self._share(those) for name, those in rows.items()}
        try:
            yield
        finally:
            self.shares = {}

    def _share(self, rows: list[int]) -> Share:
        device = next(self.model.parameters()).device
        padded = rows + rows[:1] * missing_rows(len(rows))
        return torch.tensor(rows, device=device), torch.tensor(padded, device=device)


def layer_of(key: str) -> str:
    """The layer that a weight of an adapter belongs to. Raises KeyError for one that is no linear layer's."""
    for suffix in SUFFIXES:
        if key.endswith(suffix):
            return key.removesuffix(suffix)
    raise KeyError(f"{key}: the hf rollout serves adapters of linear layers; leave others out of target_modules")
