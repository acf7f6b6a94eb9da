"""Numbers of a step: named, timed phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from marl.types import Metrics


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

    def metrics(self) -> Metrics:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    return {f"{prefix}/{key}": value for key, value in metrics.items()}
