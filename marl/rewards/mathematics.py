"""Equality of mathematical answers, by the package math-verify. It may never return: see ``processes``."""

import importlib.util
import logging
import re

from marl.rewards.answers import plain
from marl.rewards.units import unwrapped
from marl.rewards.words import folded, is_language, words

MATH_TIMEOUT_S = 5.0
"""math-verify's own default. An answer that takes longer, such as a tower of powers, is wrong, and is counted."""
# what changes no value: signs for percent, dollars and degrees
SIGNS = re.compile(r"\\?[%$]|\^\s*(?:\\circ|\{\s*\\circ\s*\})")


CLOCK = re.compile(r"[0-9]\s*[ap]\.?\s?m\.?$", re.IGNORECASE)


def hour(text: str) -> str:
    """``9 A.M.`` as ``9am``."""
    return re.sub(r"[.\s]", "", unwrapped(text).casefold())


def must_be_installed() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "mathematical answers are judged by the package math-verify, which is not installed: pip install 'marl[math]'"
        )


def equal(answer: str, truth: str) -> bool | None:
    """None for a truth that cannot be read. Raises whatever math-verify raises.

    Its own deadlines are off: they need the main thread, and an alarm does not end a computation in C.
    """
    answer, truth = SIGNS.sub("", answer).strip(), SIGNS.sub("", plain(truth) or truth).strip()
    if answer == truth:
        return True
    if any(CLOCK.search(unwrapped(text)) for text in (answer, truth)):  # math-verify drops am and pm
        return hour(answer) == hour(truth)
    # math-verify takes a word for a product of letters: Pairs would be Paris
    if (said := words(truth)) is not None and is_language(said):
        return folded(words(answer) or answer) == folded(said)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rules = (LatexExtractionConfig(), ExprExtractionConfig())
    gold, given = (
        parse(f"\\boxed{{{text}}}", rules, parsing_timeout=None, raise_on_error=True) for text in (truth, answer)
    )
    return verify(gold, given, timeout_seconds=None, raise_on_error=True) if gold else None
