"""Spans of time: when something was busy, and how long at least one of several was."""

from collections import deque
from collections.abc import Iterable, Iterator

KEPT = 1 << 17
Span = tuple[float, float]
"""Start and end, in seconds of one clock."""


def merged(spans: Iterable[Span]) -> Iterator[Span]:
    """The union of the spans, as disjoint ones in their order."""
    start = end = None
    for begins, ends in sorted(spans):
        if start is None or end is None:
            start, end = begins, ends
        elif begins <= end:
            end = max(end, ends)
        else:
            yield start, end
            start, end = begins, ends
    if start is not None and end is not None:
        yield start, end


def union_seconds(spans: Iterable[Span], within: Span) -> float:
    """Seconds of ``within`` that at least one of the spans covers."""
    first, last = within
    return sum(max(0.0, min(end, last) - max(start, first)) for start, end in merged(spans))


def placed(seconds: float, ended: float, within: Span) -> Span:
    """The span of so many seconds, by another clock's ``ended``, moved as little as possible to lie ``within``."""
    first, last = within
    end = min(max(ended, first + seconds), last)
    return end - seconds, end


class Stopwatch:
    """Spans in which a server was busy, since they were last taken; the last ``KEPT``, for they may never be."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=KEPT)

    def add(self, start: float, end: float) -> None:
        self.spans.append((start, end))

    def take(self) -> list[Span]:
        spans = list(merged(self.spans))
        self.spans.clear()
        return spans
