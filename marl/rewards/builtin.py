"""``compute_score`` without a function of the user's: by the data source.

Mathematical answers are compared by the package math-verify, which may never return: see ``processes``.
"""

import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from marl.rewards.answers import DATE, agrees, folded, is_language, plain, stated_answer, words
from marl.rewards.numbers import other_unit, unwrapped
from marl.rewards.processes import RewardError, RewardUnavailable
from marl.rewards.prose import Prose
from marl.rewards.rules import AnswerRules, kind_of

SIGNS = " \t\n.*_`$\"'"
"""Characters around an answer that do not belong to it."""
Run = Callable[..., Awaitable[Any]]
"""``run(function, arguments, timeout_s)``: in a process that can be killed, or here."""

MATH_TIMEOUT_S = 5.0
"""math-verify's own default. An answer that takes longer, such as a tower of powers, is wrong, and is counted."""
# what changes no value: signs for dollars and degrees
NO_VALUE = re.compile(r"\\?\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})")
PERCENT = re.compile(r"\s*(?:\\?%|\\(?:text|mathrm)\{\s*(?:percent|\\?%)\s*\})$")
MIXED = re.compile(r"(-?[0-9]+) ([0-9]+)/([0-9]+)")
LISTED = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?"
CODE = re.compile(r"[A-Za-z]+[0-9]\w*")
OPTION = re.compile(r"\(?([A-Za-z])\)?")

NUMBERS = re.compile(rf"{LISTED}(?:(?:\s*[,;]\s*(?:and\s)?|\s+and\s+){LISTED})+")
CLOCK = re.compile(r"[0-9]\s*[ap]\.?\s?m\.?$", re.IGNORECASE)


async def run_here(function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float | None = None) -> Any:
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{type(error).__name__}: {error}") from error


class Builtin:
    """Embedded tasks and GSM8K by string rules, on the spot; mathematics and verl's other functions through ``run``."""

    def __init__(
        self,
        answer_rule: str = "strict",
        run: Run = run_here,
        failures: Counter[str] | None = None,
        rules: AnswerRules | None = None,
    ) -> None:
        """``rules``: those of a configuration, instead of the built-in ones with this ``answer_rule``."""
        self.rules, self.run = rules or AnswerRules(answer_rule), run
        self.failures: Counter[str] = Counter() if failures is None else failures

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> float | Awaitable[Any]:
        kind = kind_of(data_source)
        if kind == "verl":
            arguments = {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth}
            return self.run(verl_score, {**arguments, "extra_info": extra_info})
        extract = self.rules.extractor(data_source, ground_truth)
        answer = extract(solution_str)
        if kind in ("math", "own"):
            stated = (extract.stated if isinstance(extract, Prose) else stated_answer)(solution_str)
            same = isinstance(extract, Prose) and is_written(ground_truth, solution_str, stated)
            return self.mathematics(answer or (solution_str.strip() if same else None), ground_truth, stated, same)
        return float(answer == str(ground_truth) if kind == "embedded" else agrees(answer, ground_truth))

    async def mathematics(
        self, answer: str | None, ground_truth: Any, stated: str | None, same: bool = False
    ) -> dict[str, Any]:
        """1 or 0. Wrong answers that could not be read or computed are reported and counted separately. ``stated``: the answer
        with its unit; one of the two may lack it, but not have another. ``same``: it is written as the truth is."""
        misnamed = stated is not None and plain(stated) == answer and other_unit(stated, str(ground_truth))
        outcome = "right" if same or (agrees(answer, ground_truth) and not misnamed) else "wrong"
        if answer is not None and outcome == "wrong" and not misnamed:
            must_be_installed()
            try:
                equals = await self.run(equal, {"answer": answer, "truth": str(ground_truth)}, MATH_TIMEOUT_S)
            except RewardUnavailable:
                raise
            except RewardError as error:
                outcome = error.kind
                self.failures[f"math_{error.kind}"] += 1
            else:
                outcome = score_of(equals, ground_truth)
        return {"score": float(outcome == "right"), "pred": answer, "math_verify": outcome}


def is_written(ground_truth: Any, text: str, stated: str | None) -> bool:
    """True if the text, or the answer that it states, is the ground truth itself, in whatever notation that is."""
    truth = folded(str(ground_truth).strip(SIGNS))
    return bool(truth) and truth in (folded(part.strip(SIGNS)) for part in (text, stated or ""))


def score_of(equals: bool | None, ground_truth: Any) -> str:
    if equals is None:
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r} cannot be read as mathematics; fix the row, or score its "
            "data_source by reward.custom_reward_function.path"
        )
    return "right" if equals else "wrong"


def verl_score(**arguments: Any) -> Any:
    from verl.utils.reward_score import default_compute_score

    return default_compute_score(**arguments)


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
    answer, truth = (NO_VALUE.sub("", plain(text) or text).strip() for text in (answer, truth))
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


builtin_compute_score = Builtin()
