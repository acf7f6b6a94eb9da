"""Episode workers: ``controller.num_workers`` processes run and score episodes, the driver counts.

A worker has a controller, built from the configuration, on the driver's node: it finds the same files there, and what it
says last can be read. What an episode is depends on its seed alone, never on who plays it.
"""

import asyncio
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from marl.cluster.failures import GroupFailed, GroupHung, group_failed, said_last
from marl.controller.collection import Play, outcomes
from marl.controller.controller import Controller
from marl.rollout.endpoint import Counts
from marl.runners import TooManyTurns
from marl.types import Episode, PolicyName, Task
from marl.utils.deadlines import wait_with_deadline
from marl.utils.garbage import freeze_gc

CHUNK, CHUNKS_A_WORKER = 64, 16
"""Episodes per message: finished ones are read while the rest still run."""
MARGIN_S = 30.0
"""Deadline for everything except running and scoring episodes, which have their own deadlines."""
STOP_S = 5.0

T = TypeVar("T")
Played = tuple[Episode | None, Exception | None]
"""A scored episode, or the error that left it unscored or unplayed."""


class Known(NamedTuple):
    """State of the run that the driver sends with every message."""

    accuracy: Mapping[str, Any]
    spent: Mapping[PolicyName, int]
    """Tokens that the run has used of each endpoint."""


class Part(NamedTuple):
    """A worker's answer: its plays' outcomes, in order, and what it has counted since its last one."""

    played: list[Played]
    failures: Counter[str]
    """Failures of the reward."""
    usage: dict[PolicyName, Counts]
    """Usage of the endpoints."""


class EpisodeFailed(RuntimeError):
    """Stands for an error in a worker whose class cannot be sent."""


def chunks(plays: int, workers: int) -> list[tuple[int, slice]]:
    """Consecutive parts of so many plays, each with its worker. Workers get equal shares, and samples of a task stay together."""
    parts = []
    for worker, share in enumerate(cut(slice(0, plays), workers)):
        size = share.stop - share.start
        parts += [(worker, part) for part in cut(share, min(CHUNKS_A_WORKER, -(-size // CHUNK)))]
    return parts


def cut(whole: slice, count: int) -> list[slice]:
    """``count`` parts whose sizes differ by one at most."""
    size = whole.stop - whole.start
    bounds = [whole.start + size * part // count for part in range(count + 1)] if count else []
    return [slice(*pair) for pair in pairwise(bounds)]


class EpisodeWorker:
    """A Ray actor that runs and scores its episodes concurrently."""

    def __init__(self) -> None:
        self.cleanup = ExitStack()

    async def start(self, make: Callable[[ExitStack], Controller]) -> int:
        self.controller = make(self.cleanup)
        freeze_gc()
        return os.getpid()

    async def play(self, plays: Sequence[Play], step: int, validate: bool, known: Known) -> Part:
        """Raises GroupFailed at once."""
        self.controller.accuracy.load_state_dict(known.accuracy)
        self.controller.go_on_from(known.spent)
        ended = await outcomes([self._play(task, sample, step, validate) for task, sample in plays])
        played = [entry if isinstance(entry, tuple) else (None, entry) for entry in ended]
        failures = self.controller.reward.failures
        counts = Counter(failures)
        failures.clear()
        sent = [(episode, error and sendable(error)) for episode, error in played]
        return Part(sent, counts, {policy: usage.take() for policy, usage in self.controller.endpoints.items()})

    async def _play(self, task: Task, sample: int, step: int, validate: bool) -> Played:
        episode = await self.controller.play_and_score(task, sample, step, validate)
        return self.controller.judged.pop(id(episode))

    async def alive(self) -> None:
        """Returns at once, unless the event loop is blocked."""

    async def stop(self) -> None:
        """End the processes of the reward, whatever they do."""
        self.cleanup.close()


def sendable(error: Exception) -> Exception:
    """The error with its traceback; its text alone if the class cannot be unpickled elsewhere."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        error = EpisodeFailed(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    frames = "".join(traceback.format_tb(error.__traceback__)[-3:])
    error.add_note(f"raised in the episode worker with pid {os.getpid()}, at\n{frames}")
    return error


def spawn(count: int, run_id: str) -> list[ActorHandle]:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here}
    actor = ray.remote(EpisodeWorker)
    return [actor.options(name=f"episode_worker_{run_id}_{index}", **options).remote() for index in range(count)]


async def answer_of(ref: Awaitable[T], ping: Callable[[], Awaitable[None]], deadline: float) -> T:
    """The answer of a process, however long its queue is. Raises TimeoutError where it gives no sign of life for so long."""
    task = asyncio.ensure_future(ref)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=deadline / 2)
            if not task.done():
                sign = asyncio.ensure_future(ping())
                await asyncio.wait([task, sign], timeout=deadline / 2, return_when=asyncio.FIRST_COMPLETED)
                silent = not sign.done()
                sign.cancel()
                if silent and not task.done():
                    raise TimeoutError
        return task.result()
    finally:
        task.cancel()


class EpisodeWorkers:
    """The driver's handle on all workers."""

    def __init__(self, actors: list[ActorHandle], episode_timeout: float) -> None:
        self.actors = actors
        self.deadline = 2 * episode_timeout + MARGIN_S
        """Deadline for a worker's sign of life; everything that its episodes wait for has a deadline of its own."""
        self.pids: list[int] = []

    async def start(
        self, make: Callable[[ExitStack], Controller], timeout: float, key: str = "resources.timeout_s"
    ) -> None:
        """Have all of them make their controller."""
        refs = [actor.start.remote(make) for actor in self.actors]
        try:
            self.pids = await wait_with_deadline(timeout, "starting the episode workers", asyncio.gather(*refs), key)
        except RayError as error:
            raise group_failed("an episode worker", "starting", error) from error

    async def play(self, plays: Sequence[Play], step: int, validate: bool, known: Known) -> list[Part]:
        """The workers' answers, in the order of the plays. Raises GroupFailed at once, where a policy or a worker failed."""
        asked = [
            asyncio.create_task(self._ask(worker, plays[part], step, validate, known))
            for worker, part in chunks(len(plays), len(self.actors))
        ]
        try:
            return await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()

    async def _ask(self, index: int, plays: Sequence[Play], step: int, *given: Any) -> Part:
        who, what = f"episode worker {index} (pid {self.pids[index]})", f"playing episodes of step {step}"
        actor = self.actors[index]
        ref = actor.play.remote(plays, step, *given)
        try:
            return await answer_of(ref, actor.alive.remote, self.deadline)
        except TimeoutError:
            raise GroupHung(
                f"{who} gave no sign of life for {self.deadline:g} s while {what}: twice controller.episode_timeout_s and "
                f"{MARGIN_S:g} s; does a reward function block it?\n  its last lines:{said_last(self.pids[index])}"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, (GroupFailed, TooManyTurns)):  # a policy's, or the runner's
                raise error.cause from None
            raise group_failed(who, what, error) from error
        except RayError as error:
            raise group_failed(who, what, error) from error
        finally:
            ray.cancel(ref)  # nothing, once it has ended

    def stop(self) -> None:
        """End the workers and the processes of their rewards."""
        asked = [actor.stop.remote() for actor in self.actors]
        ray.wait(asked, num_returns=len(asked), timeout=STOP_S)
        for actor in self.actors:
            ray.kill(actor)


class SpreadController(Controller):
    """A controller whose episodes are run and scored by workers; counts and limits are handled here."""

    def __init__(self, workers: EpisodeWorkers, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.workers = workers

    async def outcomes_of(self, plays: Sequence[Play], step: int, validate: bool) -> list[Episode | Exception]:
        known = Known(self.accuracy.state_dict(), self.spent())
        parts = await self.workers.play(plays, step, validate, known)
        for part in parts:
            self._count(part)
        results: list[Episode | Exception] = []
        for (task, _), (episode, error) in zip(plays, (entry for part in parts for entry in part.played), strict=True):
            if episode is None:
                assert error is not None
                results.append(error)
                continue
            episode.task = task  # ours, not its copy
            self.judged[id(episode)] = episode, error
            results.append(episode)
        return results

    def _count(self, part: Part) -> None:
        """Add what a worker has counted to the driver's own numbers."""
        self.reward.failures.update(part.failures)
        for policy, counts in part.usage.items():
            self.endpoints[policy].add(counts)
