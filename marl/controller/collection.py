"""Episodes of one collection: those that ended, those that were lost, and which of these are played again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from marl.cluster.failures import GroupFailed
from marl.runners import TooManyTurns
from marl.types import Episode, Task
from marl.utils.deadlines import interruptible
from marl.utils.secret_masking import masked_text

logger = logging.getLogger(__name__)
T = TypeVar("T")

Play = tuple[Task, int]
"""A task, and which of its samples."""


class EpisodesFailed(RuntimeError):
    """Too many episodes of one collection ended in an error."""


class EpisodeLost(RuntimeError):
    """Stands for the error of an episode that the same collection lost before the run was killed."""


def described(error: Exception) -> str:
    """The text of an error in the ledger, the same however often it is lost again, without the secrets that it holds."""
    return masked_text(str(error) if isinstance(error, EpisodeLost) else f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class Collection:
    """Episodes that ended, and why the others were lost."""

    episodes: list[Episode]
    failures: list[Exception] = field(default_factory=list)
    lost: list[Play] = field(default_factory=list)
    """The plays of ``failures``."""
    retried: int = 0
    """Number of retried plays."""

    @property
    def started(self) -> int:
        """Number of episodes, whether or not they succeeded."""
        return len(self.episodes) + len(self.failures)

    @property
    def refused(self) -> int:
        """Episodes that ended because a conversation grew too long."""
        return sum(episode.failure == "overflow" for episode in self.episodes)


async def outcomes(works: Sequence[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """Run all concurrently and return each one's result or error. A failed policy, or a runner that exceeds what it
    says of its turns and rounds, cancels the rest and raises."""
    running = [asyncio.create_task(work) for work in works]
    with interruptible():
        try:
            for ended in asyncio.as_completed(running):
                try:
                    await ended
                except (GroupFailed, TooManyTurns):
                    raise
                except Exception:
                    continue  # given below
        finally:
            for task in running:
                task.cancel()
    return [outcome(task) for task in running]


def outcome(task: asyncio.Task[T]) -> T | Exception:
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    return error


def to_play_again(plays: Sequence[Play], results: Sequence[Episode | Exception], share: float) -> list[int]:
    """Indices of lost plays, for tasks with less than this share of their samples left."""
    samples, left = Counter(task.id for task, _ in plays), Counter[str]()
    for (task, _), result in zip(plays, results, strict=True):
        left[task.id] += isinstance(result, Episode)
    return [
        at
        for at, ((task, _), result) in enumerate(zip(plays, results, strict=True))
        if isinstance(result, Exception) and left[task.id] < share * samples[task.id]
    ]


def collection_of(plays: Sequence[Play], results: Sequence[Episode | Exception], retried: int, step: int) -> Collection:
    """Raises EpisodesFailed where no agent produced a turn, as where all prompts are too long."""
    lost = [(play, result) for play, result in zip(plays, results, strict=True) if isinstance(result, Exception)]
    episodes = [result for result in results if isinstance(result, Episode)]
    if episodes and not any(episode.turns for episode in episodes):
        raise EpisodesFailed(
            f"in step {step} no episode has a single turn, task {episodes[0].task.id}: "
            f"{episodes[0].failure_message or 'no agent has acted'}"
        )
    return Collection(episodes, [error for _, error in lost], [play for play, _ in lost], retried)


def with_turns(episodes: Sequence[Episode], step: int) -> list[Episode]:
    """Drop episodes whose first prompt is too long, as there is nothing to train. Raises EpisodesFailed if none is
    left."""
    played = [episode for episode in episodes if episode.turns]
    if not played:
        raise EpisodesFailed(
            f"in step {step} no scored episode has a single turn: {len(episodes)} were refused before their first turn, and the "
            "others could not be scored; see the warnings above; raise data.max_prompt_length, or fix the reward function"
        )
    return played


def failures_of(results: Sequence[Any], what: str, step: int, max_error_rate: float) -> list[Exception]:
    """Log the first errors, and raise EpisodesFailed for too many."""
    failures = [result for result in results if isinstance(result, Exception)]
    for error in failures[:3]:
        logger.warning("%s failed in step %d: %s: %s", what, step, type(error).__name__, error)
    if failures and len(failures) > max_error_rate * len(results):
        raise EpisodesFailed(
            f"{what} failed for {len(failures)} of {len(results)} episodes of step {step} (controller.max_error_rate="
            f"{max_error_rate:g}); the first: {type(failures[0]).__name__}: {failures[0]}"
        ) from failures[0]
    if failures and len(failures) == len(results):
        raise EpisodesFailed(f"{what} failed for every episode of step {step}") from failures[0]
    return failures


def check_texts(episodes: Sequence[Episode], step: int, max_error_rate: float) -> None:
    """Log the first texts that could not be scored, and raise EpisodesFailed for too many."""
    turns = [turn for episode in episodes for turn in episode.turns if turn.answers]
    reasons = [turn.scored.failure for turn in turns if turn.scored.failure is not None]
    for reason in reasons[:3]:
        logger.warning("step %d: a text scores judge.failure_score: %s", step, reason)
    if reasons and (len(reasons) > max_error_rate * len(turns) or len(reasons) == len(turns)):
        raise EpisodesFailed(
            f"the reward function failed for {len(reasons)} of {len(turns)} texts of step {step} "
            f"(controller.max_error_rate={max_error_rate:g}); the first: {reasons[0]}"
        )
