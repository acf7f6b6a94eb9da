"""Equality of mathematical answers, by the package math-verify. It may never return: see ``processes``."""

import importlib.util
import logging
import re

from marl.rewards.answers import plain
from marl.rewards.units import unwrapped
from marl.rewards.words import DATE, folded, is_language, words

MATH_TIMEOUT_S = 5.0
"""math-verify's own default. An answer that takes longer, such as a tower of powers, is wrong, and is counted."""
# what changes no value: signs for dollars and degrees
SIGNS = re.compile(r"\\?\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})")
PERCENT = re.compile(r"\s*(?:\\?%|\\(?:text|mathrm)\{\s*(?:percent|\\?%)\s*\})$")
MIXED = re.compile(r"(-?[0-9]+) ([0-9]+)/([0-9]+)")
LISTED = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?"
CODE = re.compile(r"[A-Za-z]+[0-9]\w*")
OPTION = re.compile(r"\(?([A-Za-z])\)?")

NUMBERS = re.compile(rf"{LISTED}(?:(?:\s*[,;]\s*(?:and\s)?|\s+and\s+){LISTED})+")
CLOCK = re.compile(r"[0-9]\s*[ap]\.?\s?m\.?$", re.IGNORECASE)


def hour(text: str) -> str:
    """``9 A.M.`` as ``9am``."""
    return re.sub(r"[.\s]", "", unwrapped(text).casefold())


def listed(text: str, other: str) -> list[str]:
    """The numbers of ``1, 2 and 3`` in their order, also between parentheses where ``other`` has none; empty for anything else."""
    bare = text[1:-1] if text.startswith("(") and text.endswith(")") and not other.startswith("(") else text
    return re.split(r"\s*(?:[,;]\s*and|[,;]|\band)\s*", bare) if NUMBERS.fullmatch(bare) else []


def must_be_installed() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "mathematical answers are judged by the package math-verify, which is not installed: pip install 'marl[math]'"
        )


def load_verifier() -> None:
    """Import what :func:`equal` needs, before its deadline begins: on a busy machine that takes longer than any answer."""
    equal("2/1", "2")


def equal(answer: str, truth: str) -> bool | None:
    """None for a truth that cannot be read. Raises whatever math-verify raises.

    Its own deadlines are off: they need the main thread, and an alarm does not end a computation in C.
    """
    answer, truth = (SIGNS.sub("", plain(text) or text).strip() for text in (answer, truth))
    (answer, tells), (truth, asks) = PERCENT.subn("", answer), PERCENT.subn("", truth)
    if tells != asks:  # hundredths of the one
        answer, truth = (rf"\frac{{{text}}}{{100}}" if of else text for text, of in ((answer, tells), (truth, asks)))
    answer, truth = (MIXED.sub(r"\1\\frac{\2}{\3}", text) for text in (answer, truth))
    if answer == truth:
        return True
    if (given := OPTION.fullmatch(answer)) and (wanted := OPTION.fullmatch(truth)):
        return given[1] == wanted[1]
    if CODE.fullmatch(answer) or CODE.fullmatch(truth):  # math-verify takes A1 for a product, and so for 1A
        return folded(answer) == folded(truth)
    lists = [listed(one, other) for one, other in ((answer, truth), (truth, answer))]
    if all(lists):  # math-verify takes them for sets
        return len(lists[0]) == len(lists[1]) and all(map(equal, *lists))
    if any(CLOCK.search(unwrapped(text)) for text in (answer, truth)):  # math-verify drops am and pm
        return hour(answer) == hour(truth)
    # math-verify takes a word for a product of letters, and a date for a difference: Pairs would be Paris
    said = words(truth)
    if DATE.fullmatch(answer) or (said is not None and is_language(said)):
        said = said or truth
        return folded(words(answer) or answer) == folded(said)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rules = (LatexExtractionConfig(), ExprExtractionConfig())
    gold, given = (
        parse(f"\\boxed{{{text}}}", rules, parsing_timeout=None, raise_on_error=True) for text in (truth, answer)
    )
    return verify(gold, given, timeout_seconds=None, raise_on_error=True) if gold else None
