"""Deadlines for every wait."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


async def wait_with_deadline(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """Wait with a deadline. Raises TimeoutError that names the awaited call, and the key that sets the limit."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        raise TimeoutError(
            f"{what} did not end within {seconds:g} s; if it only needs longer, raise resources.timeout_s"
        ) from None


class Clock:
    """A deadline that can be stopped, by several at the same time."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout, self.stops, self.left = timeout, 0, 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        now, ends = asyncio.get_running_loop().time, self.timeout.when()
        if not self.stops and ends is not None:
            self.left = ends - now()
            self._move(None)
        self.stops += 1
        try:
            yield
        finally:
            self.stops -= 1
            if not self.stops:
                self._move(now() + self.left)

    def _move(self, when: float | None) -> None:
        with suppress(RuntimeError):  # it is over already
            self.timeout.reschedule(when)


CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


class OutOfTime(TimeoutError):
    """Raised by :func:`own_time`; any other TimeoutError comes from the work inside it."""


@asynccontextmanager
async def own_time(seconds: float) -> AsyncIterator[None]:
    """Raises OutOfTime if the block takes longer; time spent in :func:`waiting_for_others`, in any of its tasks, does not
    count."""
    timeout = asyncio.timeout(seconds)
    token = CLOCK.set(Clock(timeout))
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise OutOfTime from None
    finally:
        CLOCK.reset(token)


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Stops the clock of :func:`own_time`. The other side needs its own deadline."""
    clock = CLOCK.get()
    if clock is None:
        yield
        return
    with clock.stopped():
        yield


class HangsError(TimeoutError):
    """Raised where the other side answers no request."""


BEAT_S = 1.0


class LoopTime:
    """Time during which the event loop was free: it stops while the loop is blocked for more than a beat."""

    def __init__(self, beat: float) -> None:
        self.beat, self.blocked, self.readers = beat, 0.0, 0
        self.timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.blocked

    @contextmanager
    def running(self) -> Iterator[None]:
        """Blocking is detected only inside."""
        self.readers += 1
        if self.readers == 1:
            self._schedule()
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers and self.timer is not None:
                self.timer.cancel()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self.timer = loop.call_at(loop.time() + self.beat, self._beat)

    def _beat(self) -> None:
        assert self.timer is not None
        self.blocked += asyncio.get_running_loop().time() - self.timer.when()
        self._schedule()


class Watch:
    """Detects servers that answer no request: a queue may be long, as long as it moves. A blocked loop receives no answers,
    so its time does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.heard = seconds, 0.0
        self.time = LoopTime(min(BEAT_S, seconds / 20))

    async def answer(self, asked: Awaitable[T]) -> T:
        """Await an answer. Raises HangsError if no caller of this watch has had any answer for ``seconds``."""
        task, now = asyncio.ensure_future(asked), self.time.now
        begun = now()
        try:
            with self.time.running():
                while not task.done():
                    left = max(begun, self.heard) + self.seconds - now()
                    if left <= 0:
                        raise HangsError(f"no request was answered for {self.seconds:g} s")
                    await asyncio.wait([task], timeout=None if left == math.inf else left)
            self.heard = now()
            return task.result()
        finally:
            task.cancel()
