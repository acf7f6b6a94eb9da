"""Time spans: busy periods and their union."""

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
    """A span of this length ending near ``ended`` (another clock), shifted as little as possible to lie ``within``."""
    first, last = within
    end = min(max(ended, first + seconds), last)
    return end - seconds, end


class Stopwatch:
    """Busy spans of a server since the last :meth:`take`; only the last ``KEPT`` are kept."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=KEPT)

    def add(self, start: float, end: float) -> None:
        self.spans.append((start, end))

    def take(self) -> list[Span]:
        spans = list(merged(self.spans))
        self.spans.clear()
        return spans
