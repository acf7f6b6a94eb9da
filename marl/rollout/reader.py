"""One model, and the rows that it reads: they join with a context and leave between tokens.

Scores depend on a row's own tokens, bit for bit on a CPU, whatever is read beside it and whatever was read before: products
have a multiple of ``MIN_ROWS`` rows, attention sees ``key_width`` keys, and its mask is always explicit (left to itself,
transformers drops it, and takes another kernel, whenever no row happens to be padded).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.platform.shapes import key_width, missing_rows, near_width
from marl.rollout.adapters import AdapterBank
from marl.rollout.masks import Masks
from marl.rollout.plain_forward import OwnForward, Place, forward_of
from marl.rollout.prefixes import Node, Prefixes
from marl.rollout.slots import Slots

READ_TOKENS = 4096
"""Tokens that one forward pass over contexts reads, padding included."""
SEEN_TOKENS = 1 << 16
"""Tokens whose keys and values it sees, what was read before included: they are copied for it."""


Row = tuple[tuple[int, ...], str | None]
"""A context, and the adapter that reads it."""


class ModelReader:
    def __init__(
        self,
        model: PreTrainedModel,
        prefixes: Prefixes,
        pad_id: int,
        exact: bool = True,
        adapters: AdapterBank | None = None,
    ) -> None:
        """``prefixes``: what this model has read; ``exact``: bit for bit, as above; ``adapters``: those that rows may name."""
        self.adapters = adapters
        self.model, self.device, self.prefixes, self.pad_id = model, model.device, prefixes, pad_id
        self.key_width = key_width if exact else near_width
        self.forward, self.with_adapters = forward_of(model), OwnForward(model)
        self.masks = Masks(model.config, model.dtype)
        self.prefilled = 0
        self.clear()

    def clear(self, adapter: str | None = None) -> None:
        """Forget all rows, and all that was read; by one adapter, if it is named."""
        if adapter is None:
            self.prefixes.clear()
        else:
            self.prefixes.forget(adapter)
        self.slots, self.read = Slots(), list[list[int]]()
        self.readers = list[str | None]()
        """The adapter of each row; None for the model itself."""

    def append(
        self, contexts: Sequence[tuple[int, ...]], room: int, adapters: Sequence[str | None] | None = None
    ) -> Tensor:
        """Append a row per context; scores [B, V] of what follows. ``room``: the most tokens a row may have."""
        rows = list(zip(contexts, adapters or [None] * len(contexts), strict=True))
        held = len(self.read) + len(contexts)
        self.slots.reserve(held + missing_rows(held), self.key_width(room))
        scores: list[Tensor] = []
        for part in in_parts(rows):
            leaves = {row: self.prefixes.extend(*row) for row in dict.fromkeys(part)}
            for nodes in in_batches(leaves.values()):
                self._read(nodes)
            fill(self.slots, [leaves[row] for row in part], len(self.read) + len(scores))
            scores += [leaves[row].scores for row in part]
            self.prefixes.trim()
        self.read += map(list, contexts)
        self.readers += [adapter for _, adapter in rows]
        return torch.stack(scores)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Scores [B, V] of the token after these."""
        idle = missing_rows(len(tokens))
        at_B = torch.tensor([*map(len, self.read), *[0] * idle], device=self.device)
        ids_B = torch.tensor([*tokens, *[self.pad_id] * idle], device=self.device)
        for read, token in zip(self.read, tokens, strict=True):
            read.append(token)
        end = max(map(len, self.read))
        with self._answered_by(self.readers):
            return self._forward(self.slots, ids_B[:, None], at_B, end, self.key_width(end))[: len(tokens), 0]

    def _answered_by(self, adapters: Sequence[str | None]) -> AbstractContextManager:
        return self.adapters.routed(adapters) if self.adapters else nullcontext()

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows; remember what the others have read. Rows change places only into those of the others."""
        for row in set(range(len(self.read))) - set(rows):
            self.prefixes.insert(self.read[row], partial(self.slots.take, row), self.readers[row])
        for to, row in enumerate(rows):
            if to != row:
                self.slots.move(row, to, len(self.read[row]))
        self.read = [self.read[row] for row in rows]
        self.readers = [self.readers[row] for row in rows]
        self.prefixes.trim()

    def _read(self, nodes: Sequence[Node]) -> None:
        """Read nodes whose parents were read."""
        start_U = torch.tensor([node.start for node in nodes], device=self.device)
        size = padded(max(len(node.tokens) for node in nodes))
        padding = [[self.pad_id] * (size - len(node.tokens)) for node in nodes]
        ids_UN = torch.tensor([[*n.tokens, *pad] for n, pad in zip(nodes, padding, strict=True)], device=self.device)
        width = self.key_width(max(node.start for node in nodes) + size)
        scratch = Slots(len(nodes), width)
        fill(scratch, [node.parent for node in nodes], 0)
        rows = [*range(len(nodes)), *[0] * missing_rows(len(nodes))]
        columns = [len(nodes[u].tokens) - 1 for u in rows]
        last = torch.tensor(rows, device=self.device), torch.tensor(columns, device=self.device)
        with self._answered_by([node.adapter for node in nodes]):
            scores = self._forward(scratch, ids_UN, start_U, max(node.end for node in nodes), width, last)
        for u, node in enumerate(nodes):
            node.scores = scores[u, 0].clone()
            self.prefixes.hold(node, scratch.take(u, node.start, node.end))
        self.prefilled += sum(len(node.tokens) for node in nodes)

    def _forward(
        self, cache: Slots, ids_BN: Tensor, start_B: Tensor, end: int, width: int, last: Place | None = None
    ) -> Tensor:
        """Read tokens into the first B rows of a cache, from ``start_B`` on; past ``end`` there is padding alone."""
        positions_BN = start_B[:, None] + torch.arange(ids_BN.shape[1], device=self.device)
        cache.aim(positions_BN, width)
        mask = self.masks(positions_BN, width)
        # adapters act on calls of modules, and a plain forward pass has none
        forward = self.forward
        if self.adapters and self.adapters.shares:
            self.adapters.shape, forward = (len(ids_BN), ids_BN.shape[1]), self.with_adapters
        return forward(ids_BN, mask, positions_BN.clamp(max=end - 1), cache, last)


def padded(size: int) -> int:
    return size + missing_rows(size)


def fill(slots: Slots, ends: Sequence[Node], first: int) -> None:
    """Write into row ``first + i`` the context that ends with ``ends[i]``."""
    rows_of: dict[int, tuple[Node, list[int]]] = {}
    for row, end in enumerate(ends, first):
        for node in end.path():
            rows_of.setdefault(id(node), (node, []))[1].append(row)
    for node, rows in rows_of.values():
        slots.fill(rows, node.start, node.segment)


def in_parts(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows whose contexts have ``SEEN_TOKENS`` together, equal ones counted once: what a part has read may be forgotten after it."""
    part: dict[Row, int] = {}
    tokens = begun = 0
    for number, row in enumerate(rows):
        new = 0 if row in part else len(row[0])
        if part and tokens + new > SEEN_TOKENS:
            yield list(rows[begun:number])
            part, tokens, begun, new = {}, 0, number, len(row[0])
        part[row] = new
        tokens += new
    yield list(rows[begun:])


def in_batches(leaves: Iterable[Node]) -> Iterator[list[Node]]:
    """The unread nodes that lead to these, parents first, of like lengths together."""
    waves: dict[int, dict[int, Node]] = {}
    for leaf in leaves:
        unread = [node for node in leaf.path() if not node.segment]
        for depth, node in enumerate(unread):
            waves.setdefault(depth, {})[id(node)] = node
    for _, wave in sorted(waves.items()):
        yield from cut(sorted(wave.values(), key=lambda node: len(node.tokens)))


def cut(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Nodes sorted by length, in batches of ``READ_TOKENS`` that see ``SEEN_TOKENS``, with little padding: more than a quarter, and
    more than 64 tokens, cost more than another forward pass."""
    batch: list[Node] = []
    tokens = longest = 0
    for node in nodes:
        size, longest = padded(len(node.tokens)) * (len(batch) + 1), max(longest, node.end)
        too_large = size > READ_TOKENS or longest * (len(batch) + 1) > SEEN_TOKENS
        if batch and (too_large or 4 * (size - tokens - len(node.tokens)) > size + 256):
            yield batch
            batch, tokens, longest = [], 0, node.end
        batch.append(node)
        tokens += len(node.tokens)
    if batch:
        yield batch
