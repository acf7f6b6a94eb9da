"""Scores on turns by verl's contract: ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""

import asyncio
import inspect
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

from marl.rewards.builtin import Builtin, load_verifier, run_here
from marl.rewards.custom import Custom, custom_function
from marl.rewards.processes import Processes, RewardError, RewardUnavailable
from marl.rewards.rules import answer_rules
from marl.types import LARGEST_SCORE, Metrics, Score, Task

logger = logging.getLogger(__name__)

ComputeScore = Callable[..., Any]
TIMEOUT_KEY = "judge.timeout_s"


class Reward:
    """Judges texts with one reward function, sync or async, that returns a number or a dict with ``score``.

    Further keys of a dict are kept. The answer is what the task's extractor finds; a ``pred`` that says otherwise is warned of,
    once a data source. ``timeout_s`` is the deadline of an async function; ``failures`` counts texts that could not be judged, and may be shared with the function.
    """

    def __init__(
        self,
        compute_score: ComputeScore,
        timeout_s: float | None = None,
        failures: Counter[str] | None = None,
        name: str = "the reward function",
    ) -> None:
        self.compute_score, self.timeout_s, self.name = compute_score, timeout_s, name
        self.failures: Counter[str] = Counter() if failures is None else failures
        self.warned_of: set[str] = set()

    async def judge_or_fail(self, task: Task, text: str, failure_score: float) -> Score:
        """The score; where the function fails on this text, ``failure_score`` with the reason (``Score.failure``). Raises
        RewardUnavailable where nothing was there to judge it."""
        try:
            return await self.judge(task, text)
        except RewardUnavailable:
            raise
        except (RewardError, TypeError, ValueError) as error:
            return Score(failure_score, task.extract(text), failure=f"{type(error).__name__}: {error}")

    async def judge(self, task: Task, text: str) -> Score:
        """Raises RewardError where the function fails, TypeError or ValueError where it returns no finite score."""
        try:
            result = await self._score(task, text)
        except RewardError as error:
            self.failures[error.kind] += 1
            said = f"the reward function failed for task {task.id}: {error}"
            raise type(error)(said, error.kind) from error
        except (Exception, SystemExit) as error:  # sys.exit() is a fault of this text alone
            self.failures["errors"] += 1
            missing = isinstance(error, ImportError)  # a package, whatever the text
            raise (RewardUnavailable if missing else RewardError)(
                f"the reward function failed for task {task.id} of data_source={task.data_source}: {type(error).__name__}: "
                f"{error}; expected a number or a dict with 'score', for every text"
            ) from error
        try:
            score = to_score(result, task, text)
        except (TypeError, ValueError) as error:
            self.failures["errors"] += 1
            raise type(error)(f"{self.name} returned {error}") from None
        self._compare(score, task)
        return score

    def _compare(self, score: Score, task: Task) -> None:
        """Warn of a function that reads other answers out of texts than votes and reports do."""
        pred, source = score.extra.get("pred"), task.data_source
        if source in self.warned_of or pred is None or str(pred) == score.answer:
            return
        self.warned_of.add(source)
        logger.warning(
            "data_source=%s: the reward function's pred is %r where the extractor finds %r (task %s). Votes, credit and reports "
            "use the extractor: let the reward's file export extract(text), or set judge.extractors",
            source, str(pred)[:80], score.answer, task.id,
        )  # fmt: skip

    async def _score(self, task: Task, text: str) -> Any:
        result = self.compute_score(
            data_source=task.data_source, solution_str=text, ground_truth=task.ground_truth, extra_info=dict(task.extra)
        )
        if not inspect.isawaitable(result):
            return result
        waiting = asyncio.timeout(self.timeout_s)
        try:
            async with waiting:
                return await result
        except TimeoutError:
            if not waiting.expired():  # the function's own
                raise
            raise RewardError(f"it took longer than {TIMEOUT_KEY}={self.timeout_s:g} s", "timeouts") from None

    def metrics(self) -> Metrics:
        """Number of texts that could not be scored since the last call, by kind; ``math_…`` were given the score 0."""
        counts, kinds = Counter(self.failures), ("timeouts", "deaths", "errors")
        self.failures.clear()
        return {f"reward/{kind}": float(counts[kind]) for kind in (*kinds, *(f"math_{kind}" for kind in kinds))}


def to_score(result: Any, task: Task, text: str) -> Score:
    extra: Mapping[str, Any] = {}
    acc: float | None = None
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(
                f"a dict without 'score' for task {task.id}: keys {sorted(map(str, result))}; "
                "expected a number or a dict with 'score'"
            )
        extra = {key: value for key, value in result.items() if key not in ("score", "acc")}
        acc, result = acc_of(result.get("acc"), task), result["score"]
    try:
        score = float(result)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # the last: a tensor of several numbers
        raise TypeError(f"{repr(result)[:80]} for task {task.id}; expected a number or a dict with 'score'") from None
    if not abs(score) <= LARGEST_SCORE:
        raise ValueError(
            f"{score} for task {task.id}; expected a finite number between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}"
        )
    return Score(value=score, answer=task.extract(text), extra=extra, acc=acc)


def acc_of(acc: Any, task: Task) -> float | None:
    """verl's ``acc``: whether the text is right, whatever its score."""
    if acc is None:
        return None
    try:
        share = float(acc)
    except (TypeError, ValueError, RuntimeError):
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError(
            f"acc={repr(acc)[:80]} for task {task.id}; expected true, false or a number from 0 to 1, of "
            "which 1 is right"
        )
    return share


def build_reward(config: Any, cleanup: ExitStack) -> Reward:
    """The user's function or the built-in ones, in ``judge.processes`` processes, which ``cleanup`` ends, or in this one."""
    count, timeout_s = config.judge.processes, config.judge.timeout_s
    custom, failures, rules = custom_function(config), Counter[str](), answer_rules(config)
    name = f"{custom.name} of {custom.path}" if custom else "the built-in reward function"
    if custom is not None and (custom.is_async or not count):
        return Reward(custom, timeout_s if custom.is_async else None, failures, name)
    if not count:
        return Reward(Builtin(run=run_here, failures=failures, rules=rules), failures=failures, name=name)
    processes = Processes(count, timeout_s, TIMEOUT_KEY, prepare=custom.load if custom else load_verifier)
    cleanup.callback(processes.stop)
    built_in = Builtin(run=processes.run, failures=failures, rules=rules)
    return Reward(in_processes(processes, custom) if custom else built_in, failures=failures, name=name)


def in_processes(processes: Processes, function: Custom) -> Callable[..., Awaitable[Any]]:
    async def compute_score(**arguments: Any) -> Any:
        return await processes.run(function, arguments)

    return compute_score
