"""Estimates from right and wrong answers, and comparisons on the same tasks. Pure.

Tasks are what is drawn: samples of one task are no new tasks, so that every resampling is one of tasks.
"""

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from marl.utils.intervals import paired

RESAMPLES = 10_000
MOST_SUBSETS = 2_000
"""Subsets of a task's samples whose majorities are averaged; of more, so many are drawn."""
EXACT = 14
"""Differing tasks up to which all signs are tried."""
CHUNK = 1 << 22
"""Numbers drawn at a time."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k samples is right, of n of which c are: 1 - C(n - c, k) / C(n, k), unbiased (arXiv:2107.03374)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int, seed: int = 0) -> float:
    """Probability that the most frequent of k samples' answers is right: the mean over the subsets of k samples. Ties count by
    their share, abstentions (None) are no vote, and nobody's answer is wrong."""
    good = {answer for answer, ok in zip(answers, right, strict=True) if ok and answer is not None}
    subsets = subsets_of(len(answers), k, seed)
    return math.fsum(majority_is_right([answers[i] for i in subset], good) for subset in subsets) / len(subsets)


def subsets_of(n: int, k: int, seed: int) -> list[tuple[int, ...]]:
    if math.comb(n, k) <= MOST_SUBSETS:
        return list(combinations(range(n), k))
    rng = random.Random(seed)
    return [tuple(rng.sample(range(n), k)) for _ in range(MOST_SUBSETS)]


def majority_is_right(answers: Sequence[str | None], good: set[str]) -> float:
    cast = [answer for answer in answers if answer is not None]
    most = max((cast.count(answer) for answer in set(cast)), default=0)
    best = [answer for answer in set(cast) if cast.count(answer) == most]
    return sum(answer in good for answer in best) / len(best) if best else 0.0


def ks_up_to(n: int) -> list[int]:
    """1, 2, 4, … and n."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def sign_flip_p(differences_T: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test: were the two alike, every task's difference could have had the other
    sign. Exact up to ``EXACT`` differing tasks (for single samples McNemar's exact test), else from random signs."""
    values = np.asarray([value for value in differences_T if value], dtype=float)
    if not len(values):
        return 1.0
    observed = abs(values.sum()) - 1e-12
    if len(values) <= EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
        return float((abs(signs @ values) >= observed).mean())
    rng = np.random.default_rng(seed)
    extreme = sum(
        int((abs(rng.choice((-1.0, 1.0), size=(part, len(values))) @ values) >= observed).sum())
        for part in parts_of(RESAMPLES, max(1, CHUNK // len(values)))
    )
    return (1 + extreme) / (1 + RESAMPLES)


def parts_of(total: int, each: int) -> list[int]:
    return [min(each, total - start) for start in range(0, total, each)]


def compared(a_T: Sequence[float], b_T: Sequence[float]) -> dict[str, Any]:
    """The difference a - b of two means on the same tasks."""
    differences = [a - b for a, b in zip(a_T, b_T, strict=True)]
    return {
        "difference": math.fsum(differences) / len(differences),
        "interval": paired(differences),
        "p": sign_flip_p(differences),
    }
