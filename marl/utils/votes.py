"""Winning answers of a vote. Pure: runners decide by it, and credit computes counterfactual decisions with it."""

from collections.abc import Sequence
from math import fsum, isclose

from marl.types import Rule


def winners(rule: Rule, answers: Sequence[str | None], weights: Sequence[float]) -> list[str]:
    """The tied winning answers; none if no answer wins. Abstentions (None) do not count for ``heaviest``,
    prevent ``agreed``, and leave ``last`` without an answer if the last entry is one."""
    if rule is Rule.heaviest:
        return heaviest(answers, weights)
    decides = answers[-1] if answers and (rule is Rule.last or len(set(answers)) == 1) else None
    return [] if decides is None else [decides]


def heaviest(answers: Sequence[str | None], weights: Sequence[float]) -> list[str]:
    """The answers with the largest sum of weights; sums that differ by rounding alone, as .1 + .2 and .3, are equal. If a weight is
    negative, all are measured from the lowest one, since no vote counts against its own answer; among equal sums, the answer
    with more votes wins."""
    cast: dict[str, list[float]] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            cast.setdefault(answer, []).append(weight)
    given = [weight for own in cast.values() for weight in own]
    least, rounding = min([0.0, *given]), 1e-9 * max(map(abs, given), default=0.0)
    sums = {answer: fsum(weight - least for weight in own) for answer, own in cast.items()}
    most = max(sums.values(), default=0.0)
    tied = [answer for answer, own in sums.items() if isclose(own, most, rel_tol=1e-9, abs_tol=rounding)]
    votes = max((len(cast[answer]) for answer in tied), default=0)
    return [answer for answer in tied if least == 0 or len(cast[answer]) == votes]
