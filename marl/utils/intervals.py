"""Intervals of means over tasks, at 95 %, in closed form. Pure.

A task's samples are no new tasks: their mean counts as one number, whose deviation is at most that of a single sample.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Interval(NamedTuple):
    low: float
    high: float


def wilson(share: float, tasks: int) -> Interval:
    """Interval of a share over tasks (Wilson, 1927): it is as wide as it has to be at 0 and 1 too, where resamples are all
    alike, and conservative where a task has several samples."""
    weight = 1 / (1 + Z * Z / tasks)
    middle = weight * (share + Z * Z / (2 * tasks))
    half = weight * Z * math.sqrt(max(0.0, share * (1 - share)) / tasks + (Z / (2 * tasks)) ** 2)
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def paired(differences_T: Sequence[float]) -> Interval:
    """Interval of the mean of differences between -1 and 1 on the same tasks (Bonett and Price, 2012): that of a normal mean, with
    one more task on which either side wins."""
    total = len(differences_T) + 2
    mean = math.fsum(differences_T) / total
    variance = (math.fsum(d * d for d in differences_T) + 2) / total - mean * mean
    half = Z * math.sqrt(variance / total)
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


def share(value: float | None, tasks: int | None = None) -> str:
    """A share for a table, with its interval if it is one over tasks."""
    if value is None:
        return "-"
    return f"{value:.3f}" + ("" if tasks is None else " [{:.2f}, {:.2f}]".format(*wilson(value, tasks)))
