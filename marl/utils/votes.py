"""Winning answers of a vote. Pure: runners decide by it, and credit computes counterfactual decisions with it."""

from collections import Counter
from collections.abc import Sequence

from marl.types import Rule


def winners(rule: Rule, answers: Sequence[str | None], weights: Sequence[float]) -> list[str]:
    """The tied winning answers; none if no answer wins. Abstentions (None) do not count for the
    heaviest, are no agreement, and leave the last one without an answer."""
    if rule is Rule.heaviest:
        return heaviest(answers, weights)
    decides = answers[-1] if answers and (rule is Rule.last or len(set(answers)) == 1) else None
    return [] if decides is None else [decides]


def heaviest(answers: Sequence[str | None], weights: Sequence[float]) -> list[str]:
    sums: Counter[str] = Counter()
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            sums[answer] += weight  # type: ignore[assignment]
    most = max(sums.values(), default=0)
    return [answer for answer, weight in sums.items() if weight == most]
