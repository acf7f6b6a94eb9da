"""Winning answers of a vote. Pure: runners decide by it, and credit computes counterfactual decisions with it."""

from collections.abc import Sequence

from marl.types import Rule


def winners(rule: Rule, answers: Sequence[str | None], weights: Sequence[float]) -> list[str]:
    """The tied winning answers; none if no answer wins. Abstentions (None) do not count for ``heaviest``,
    prevent ``agreed``, and leave ``last`` without an answer if the last entry is one."""
    if rule is Rule.heaviest:
        return heaviest(answers, weights)
    decides = answers[-1] if answers and (rule is Rule.last or len(set(answers)) == 1) else None
    return [] if decides is None else [decides]


def heaviest(answers: Sequence[str | None], weights: Sequence[float]) -> list[str]:
    """The answers with the largest sum of weights. If a weight is negative, all are measured from the lowest one, since no
    vote counts against its own answer; among equal sums, the answer with more votes wins."""
    cast = [(answer, weight) for answer, weight in zip(answers, weights, strict=True) if answer is not None]
    least = min([0.0, *(weight for _, weight in cast)])
    sums: dict[str, tuple[float, int]] = {}
    for answer, weight in cast:
        total, count = sums.get(answer, (0.0, 0))
        sums[answer] = total + weight - least, count + (least < 0)
    most = max(sums.values(), default=None)
    return [answer for answer, support in sums.items() if support == most]
