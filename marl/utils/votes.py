"""Winning answers of a vote. Pure: runners decide by it, and credit computes counterfactual decisions with it."""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import fsum, isclose

from marl.types import Rule

NUMBER = r"-?[0-9]{1,100}(?:\.[0-9]{1,100})?"
RATIO = re.compile(rf"({NUMBER})(?:/([0-9]{{1,100}}))?(\\?%)?|(-?)\\frac\{{([0-9]{{1,100}})\}}\{{([0-9]{{1,100}})\}}")
SIGN = re.compile(r"\s*([,;:()\[\]+*/=<>-])\s*")
WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}")


def united(answers: Sequence[str | None]) -> list[str | None]:
    """Each answer as the first one writes it that says the same: 1/2, 0.5 and 50% are one, as are Paris and paris."""
    first: dict[str, str] = {}
    return [answer if answer is None else first.setdefault(meaning(answer), answer) for answer in answers]


def meaning(answer: str) -> str:
    """One notation of an answer: blanks at signs do not count, nor case in words, nor the way to write a ratio."""
    if "\n" in answer:  # a program
        return answer
    text = " ".join(SIGN.sub(r"\1", answer).split()).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    if ratio := RATIO.fullmatch(text):
        value, below, percent, sign, numerator, denominator = ratio.groups()
        divisor = int(below or denominator or 1) * (100 if percent else 1)
        return str(Fraction(value or sign + numerator) / divisor) if divisor else text
    return text.casefold() if WORD.search(text) else text


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
