"""Numbers of a step: named, timed phases."""

import math
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from marl.types import Metrics

T = TypeVar("T")


class PhaseTimer:
    """Wall seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    async def of(self, phase: str, work: Awaitable[T]) -> T:
        """Await the work of one phase."""
        with self(phase):
            return await work

    async def rest_of(self, phase: str, work: Awaitable[T]) -> T:
        """Await work within which other phases are timed; this one gets the time beyond theirs."""
        before, started = sum(self.seconds.values()), time.perf_counter()
        done = await work
        self.seconds[phase] = time.perf_counter() - started - (sum(self.seconds.values()) - before)
        return done

    def metrics(self) -> Metrics:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


class RunningMean:
    """Mean of the values so far; None before the first."""

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total, self.count = total, count

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    return {f"{prefix}/{key}": value for key, value in metrics.items()}


class NotFinite(RuntimeError):
    """Raised for a loss or gradient norm that is not finite; nothing of this step is saved."""


def must_be_finite(kind: str, updates: Mapping[str, Metrics], step: int) -> None:
    """Raise NotFinite for the first loss or gradient norm of these that is no number."""
    for name, numbers in updates.items():
        for key in ("grad_norm", "loss"):
            if key in numbers and not math.isfinite(numbers[key]):
                raise NotFinite(
                    f"{kind} {name!r}, step {step}: {key} is {numbers[key]}. Nothing of this step is saved; "
                    "lower its optim.lr, or look at agent/*/log_prob_gap_max and the rewards of this step"
                )
