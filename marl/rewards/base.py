"""Verdicts on turns by verl's contract: ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from marl.rewards.answers import extractor
from marl.types import Task, Verdict

ComputeScore = Callable[..., Any]


class Reward:
    """Judges texts with one reward function, sync or async, that returns a number or a dict with ``score``.

    Further keys of a dict are kept; ``pred``, if there, is taken for the answer.
    """

    def __init__(self, compute_score: ComputeScore) -> None:
        self.compute_score = compute_score

    async def judge(self, task: Task, text: str) -> Verdict:
        """Raises TypeError or ValueError where the function returns something that is no finite score."""
        result = self.compute_score(
            data_source=task.data_source, solution_str=text, ground_truth=task.ground_truth, extra_info=dict(task.extra)
        )
        if inspect.isawaitable(result):
            result = await result
        return to_verdict(result, task, text)


def to_verdict(result: Any, task: Task, text: str) -> Verdict:
    extra: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(
                f"the reward function returned a dict without 'score' for task {task.id}: keys {sorted(result)}"
            )
        extra = {key: value for key, value in result.items() if key != "score"}
        result = result["score"]
    try:
        score = float(result)
    except (TypeError, ValueError):
        raise TypeError(
            f"the reward function returned {result!r} for task {task.id}; expected a number or a dict with 'score'"
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
