"""Arithmetic of the figures. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Step = Mapping[str, Any]
"""A system's report of one step: ``cpu`` and ``wall`` seconds, ``parts``, ``work``, ``changed`` and counters."""

KEYS = ("samples", "prompt_tokens", "response_tokens", "forwarded_tokens", "trained_tokens")


class WorkDiffers(ValueError):
    """Raised where two systems that are compared did not do the same."""


@dataclass(frozen=True)
class Spread:
    """A figure: the median over rounds, and how far they lie apart."""

    median: float
    lowest: float
    highest: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))


def seconds(step: Step, clock: str) -> float:
    """CPU seconds of a step, its wall seconds, or the CPU seconds of one of its parts."""
    return float(step[clock] if clock in ("cpu", "wall") else step["parts"][clock])


def paired(ours: Sequence[Step], theirs: Sequence[Step], clock: str = "cpu") -> list[float]:
    """Each round's ratio, ours / theirs."""
    return [seconds(own, clock) / seconds(other, clock) for own, other in zip(ours, theirs, strict=True)]


def paired_rates(ours: Sequence[Step], theirs: Sequence[Step], clock: str = "cpu") -> list[float]:
    """Each round's ratio of response tokens a second, ours / theirs."""
    ratios = paired(ours, theirs, clock)
    tokens = [[step["work"]["response_tokens"] for step in steps] for steps in (ours, theirs)]
    return [own / other / ratio for own, other, ratio in zip(*tokens, ratios, strict=True)]


def require_same_work(
    ours: tuple[str, Sequence[Step]],
    theirs: tuple[str, Sequence[Step]],
    keys: Iterable[str] = KEYS,
    left_out: Mapping[str, int] | None = None,
) -> None:
    """Raise WorkDiffers for the first count that two named systems do not share in a round.

    ``left_out``: tokens of every sample that the other system is known not to process.
    """
    for index, (own, other) in enumerate(zip(ours[1], theirs[1], strict=True), 1):
        for key in keys:
            missing = (left_out or {}).get(key, 0) * other["work"]["samples"]
            if own["work"][key] != other["work"][key] + missing:
                raise WorkDiffers(
                    f"round {index}: {key} of {ours[0]} is {own['work'][key]}, of {theirs[0]} {other['work'][key]}"
                    f"{f' and {missing} left out' if missing else ''}; expected the same work, give both the same load"
                )


def require_training(name: str, steps: Sequence[Step]) -> None:
    """Raise WorkDiffers if a step left the parameters as they were; ``changed`` is None for a system that only samples."""
    for index, step in enumerate(steps, 1):
        if step["changed"] is False:
            raise WorkDiffers(f"round {index}: {name} did not change its parameters; expected an update in every step")
