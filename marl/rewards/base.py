"""Verdicts on turns by verl's contract: ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from marl.rewards.answers import extractor
from marl.types import Task, Verdict
from marl.utils.deadlines import interrupted

ComputeScore = Callable[..., Any]


class RewardFailed(RuntimeError):
    """The reward function raised."""


class RewardHung(RuntimeError):
    """The reward function blocks: while it does, no episode goes on."""


class Reward:
    """Judges texts with one reward function, sync or async, that returns a number or a dict with ``score``.

    Further keys of a dict are kept; ``pred``, if there, is taken for the answer.
    """

    def __init__(self, compute_score: ComputeScore, timeout: float = math.inf) -> None:
        self.compute_score, self.timeout = compute_score, timeout

    async def judge(self, task: Task, text: str) -> Verdict:
        """Raises TypeError or ValueError where the function returns something that is no finite score, RewardFailed where
        it raises, RewardHung where it blocks for longer than ``timeout``."""
        hung = RewardHung(
            f"the reward function did not return within {self.timeout:g} s for task {task.id}, and nothing goes on meanwhile; "
            "give it a deadline, make it async, or raise controller.episode_timeout_s"
        )
        try:
            with interrupted(self.timeout, hung):
                result = self.compute_score(
                    data_source=task.data_source,
                    solution_str=text,
                    ground_truth=task.ground_truth,
                    extra_info=dict(task.extra),
                )
            if inspect.isawaitable(result):
                result = await result
        except RewardHung:
            raise
        except Exception as error:  # the user's code
            raise RewardFailed(
                f"the reward function raised {type(error).__name__}: {error} for task {task.id} of data_source="
                f"{task.data_source}; expected a number or a dict with 'score', for every text"
            ) from error
        return to_verdict(result, task, text)


def to_verdict(result: Any, task: Task, text: str) -> Verdict:
    extra: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(
                f"the reward function returned a dict without 'score' for task {task.id}: keys {sorted(map(str, result))}; "
                "expected a number or a dict with 'score'"
            )
        extra = {key: value for key, value in result.items() if key != "score"}
        result = result["score"]
    try:
        score = float(result)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # the last: a tensor of several numbers
        raise TypeError(
            f"the reward function returned {repr(result)[:80]} for task {task.id}; expected a number or a dict with 'score'"
        ) from None
    if not math.isfinite(score):
        raise ValueError(f"the reward function returned {score} for task {task.id}; expected a finite number")
    answer = extra["pred"] if "pred" in extra else task.extract(text)
    return Verdict(score=score, answer=None if answer is None else str(answer), extra=extra)


def builtin_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float | dict[str, Any] | Awaitable[Any]:
    """Exact match for the embedded tasks (``marl/…``), verl's own function for every other data source."""
    if data_source.startswith("marl/"):
        return float(extractor(data_source)(solution_str) == str(ground_truth))
    from verl.utils.reward_score import default_compute_score

    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
