"""Conversations that were read: trees of tokens with their keys and values, bounded by bytes, so that equal prefixes are
read once. A tree is of one model with one set of weights, an adapter's included: whoever changes them clears it."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, count, takewhile

import torch

from marl.rollout.slots import Segment


class Node:
    """Consecutive tokens after those of the parent."""

    __slots__ = ("adapter", "children", "parent", "scores", "segment", "start", "tokens", "used")

    def __init__(self, parent: "Node | None", start: int, tokens: tuple[int, ...], adapter: str | None = None) -> None:
        self.parent = parent or self
        """The root is its own."""
        self.adapter: str | None = parent.adapter if parent else adapter
        """The adapter that reads them; None for the model itself."""
        self.start, self.tokens = start, tokens
        self.children: dict[int, Node] = {}
        self.segment: Segment = []
        """Empty until a model has read them."""
        self.scores = torch.empty(0)
        """Scores of the next token, if a context ends here [V]."""
        self.used = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list["Node"]:
        """From the root's child to this one."""
        nodes, node = [], self
        while node.parent is not node:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.segment for x in layer) + self.scores.nbytes


class Prefixes:
    def __init__(self, limit: int) -> None:
        """``limit``: of bytes that outlast a request."""
        self.limit, self.clock, self.bytes = limit, count(1), 0
        self.roots: dict[str | None, Node] = {}

    def clear(self) -> None:
        for root in self.roots.values():
            dissolve(root)
        self.roots.clear()
        self.bytes = 0

    def forget(self, adapter: str) -> None:
        """Drop one adapter's conversations."""
        if root := self.roots.pop(adapter, None):
            self.bytes -= sum(node.nbytes() for node in below(root))
            dissolve(root)

    def hold(self, node: Node, segment: Segment) -> None:
        """Give a node what a model has read."""
        node.segment = segment
        if node.parent.children.get(node.tokens[0]) is node:
            self.bytes += node.nbytes()

    def extend(self, context: tuple[int, ...], adapter: str | None = None) -> Node:
        """The node that ends with this context. Where the context is known but its scores are not, the last token is unread."""
        node, known = self._descend(context, adapter)
        if node.end == len(context) and len(node.scores):
            return node
        if known == len(context):
            return Node(node, known - 1, context[-1:])
        return self._add(node, known, context[known:])

    def insert(self, ids: Sequence[int], take: Callable[[int, int], Segment], adapter: str | None = None) -> None:
        """Remember what a model has read; ``take(start, end)`` gives its keys and values."""
        if self.limit:
            node, known = self._descend(tuple(ids), adapter)
            if known < len(ids):
                self.hold(self._add(node, known, tuple(ids[known:])), take(known, len(ids)))

    def trim(self) -> None:
        """Forget the conversations used longest ago until the rest fits."""
        if self.bytes <= self.limit:
            return
        leaves = [(node.used, -node.start, id(node), node) for node in self._nodes() if not node.children]
        heapify(leaves)
        while self.bytes > self.limit and leaves:
            *_, leaf = heappop(leaves)
            parent = leaf.parent
            del parent.children[leaf.tokens[0]]
            self.bytes -= leaf.nbytes()
            if not parent.children and parent.parent is not parent:
                heappush(leaves, (parent.used, -parent.start, id(parent), parent))

    def _descend(self, context: tuple[int, ...], adapter: str | None) -> tuple[Node, int]:
        """The node at which the known part of this context ends, and that part's length. Splits a node where it ends inside one."""
        node, known, now = self.roots.setdefault(adapter, Node(None, 0, (), adapter)), 0, next(self.clock)
        node.used = now
        while known < len(context) and (child := node.children.get(context[known])) is not None:
            same = common(child.tokens, context[known : known + len(child.tokens)])
            known += same
            if same < len(child.tokens):
                child = self._split(child, same)
            node, child.used = child, now
        return node, known

    def _add(self, parent: Node, start: int, tokens: tuple[int, ...]) -> Node:
        node = parent.children[tokens[0]] = Node(parent, start, tokens)
        node.used = parent.used
        return node

    def _split(self, node: Node, size: int) -> Node:
        """Cut a node after ``size`` tokens; returns the first part. The rest stays who it was."""
        first = self._add(node.parent, node.start, node.tokens[:size])
        first.children[node.tokens[size]] = node
        first.segment, node.segment = (
            [tuple(x[:, part].clone() for x in layer) for layer in node.segment]
            for part in (slice(size), slice(size, None))
        )
        node.parent, node.start, node.tokens = first, node.start + size, node.tokens[size:]
        return first

    def _nodes(self) -> Iterator[Node]:
        return chain.from_iterable(map(below, self.roots.values()))


def below(root: Node) -> Iterator[Node]:
    found = list(root.children.values())
    while found:
        node = found.pop()
        found += node.children.values()
        yield node


def dissolve(root: Node) -> None:
    """Part the nodes from their children: cycles would hold their tensors until the garbage collector comes by."""
    for node in [root, *below(root)]:
        node.children = {}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    if one == other:
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
