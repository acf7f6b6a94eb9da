"""``compute_score`` without a function of the user's: by the data source."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from marl.rewards.answers import agrees, plain, stated_answer
from marl.rewards.extractors import AnswerRules
from marl.rewards.mathematics import MATH_TIMEOUT_S, equal, must_be_installed
from marl.rewards.processes import RewardError, RewardUnavailable
from marl.rewards.prose import Prose
from marl.rewards.sources import kind_of
from marl.rewards.units import other_unit
from marl.rewards.words import folded

SIGNS = " \t\n.*_`$\"'"
"""Characters around an answer that do not belong to it."""
Run = Callable[..., Awaitable[Any]]
"""``run(function, arguments, timeout_s)``: in a process that can be killed, or here."""


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


builtin_compute_score = Builtin()
