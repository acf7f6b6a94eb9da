"""Deadlines for every wait."""

import asyncio
import math
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlinePassed(TimeoutError):
    """Raised by :func:`wait_with_deadline`."""


async def wait_with_deadline(seconds: float, what: str, awaitable: Awaitable[T], key: str = "resources.timeout_s") -> T:
    """Wait with a deadline. Raises DeadlinePassed that names the awaited call, and the key that sets the limit; the call's own
    TimeoutError stays what it is."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlinePassed(told_late(what, seconds, key)) from None


def told_late(what: str, seconds: float, key: str) -> str:
    return f"{what} did not end within {seconds:g} s; if it only needs longer, raise {key}"


@contextmanager
def interrupted_after(seconds: float, what: str, key: str) -> Iterator[None]:
    """Deadline of a block that waits without the event loop, as libraries do. Raises DeadlinePassed. There is none in another
    thread than the main one, which gets the signal, nor where somebody's alarm rings earlier.

    The alarm interrupts the block as Ctrl-C would: Ray's waits drop all other errors of a handler."""
    began, others = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    if seconds == math.inf or not is_free(others, seconds):
        yield
        return

    rang = False

    def late(*_: object) -> None:
        nonlocal rang
        rang = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt:
        if not rang:
            raise
        raise DeadlinePassed(told_late(what, seconds, key)) from None
    finally:
        give_alarm_back(before, others, began)


class Blocked(KeyboardInterrupt):
    """Interrupts the main thread as Ctrl-C does, and passes where that passes."""


class LoopAlarm:
    """Deadline of code that blocks the main thread's event loop, where no other deadline can pass. With it around ``asyncio.run``,
    a loop that does not come by for ``seconds`` inside :func:`interruptible` is interrupted, and DeadlinePassed raised."""

    def __init__(self, seconds: float, what: str, key: str, when_late: Callable[[], object]) -> None:
        self.seconds, self.said, self.when_late = seconds, told_late(what, seconds, key), when_late
        self.inside, self.rang = 0, False
        self.lent: tuple[Any, float, float] | None = None
        """The alarm of others that this one stands in for."""

    def __enter__(self) -> None:
        self.token = ALARM.set(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        ALARM.reset(self.token)
        self._disarm()
        # Ray's waits raise a plain KeyboardInterrupt in its place; one that came while it passed is a person's
        replaced = self.rang and kind is KeyboardInterrupt and not isinstance(error and error.__context__, Blocked)
        if kind is Blocked or replaced:
            raise DeadlinePassed(self.said) from None

    @contextmanager
    def beats(self) -> Iterator[None]:
        self.inside += 1
        if self.inside == 1:
            self._arm()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside and self.rang:  # what else ends now may block as well
                signal.setitimer(signal.ITIMER_REAL, ENDING_S, ENDING_S)
            elif not self.inside:
                self._disarm()

    def _arm(self) -> None:
        began, others = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
        if is_free(others, self.seconds):
            self.lent = signal.signal(signal.SIGALRM, self._ring), others, began
            signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)
            self.beating = asyncio.create_task(self._beat(began + others - self.seconds if others else math.inf))

    def _disarm(self) -> None:
        lent, self.lent = self.lent, None
        if lent is not None:
            self.beating.cancel()
            give_alarm_back(*lent)

    async def _beat(self, ends: float) -> None:
        """Until the alarm of others is due."""
        while time.monotonic() < ends:
            self.rang = False  # where it was swallowed
            signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)
            await asyncio.sleep(min(BEAT_S, self.seconds / 4))
        self._disarm()

    def _ring(self, *_: object) -> None:
        if sys.gettrace() is not None:  # somebody stands at a breakpoint
            return
        self.rang = True
        try:
            self.when_late()
        finally:
            raise Blocked


ENDING_S = 300.0
"""A run that was interrupted ends within this time, or is interrupted again."""
ALARM: ContextVar[LoopAlarm | None] = ContextVar("alarm", default=None)


def interruptible() -> AbstractContextManager[None]:
    """A block that runs code of others in this loop; no deadline where there is no alarm."""
    alarm = ALARM.get()
    return alarm.beats() if alarm else nullcontext()


def is_free(others: float, seconds: float) -> bool:
    """True for the main thread, which gets the signal, if nobody's alarm rings in ``others`` seconds, or only later than ours."""
    return threading.current_thread() is threading.main_thread() and not 0 < others <= seconds


def give_alarm_back(handler: Any, seconds: float, began: float) -> None:
    """Go on with the alarm of others that was to ring ``seconds`` after ``began``; 0: with none."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, max(seconds - (time.monotonic() - began), 0.001) if seconds else 0)


class Clock:
    """A deadline that is paused inside ``with clock:``; several tasks may pause it at once.

    Pausing happens several times per turn, so the timer is left running and rescheduled only after it fires.
    """

    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self.timeout, self.loop = timeout, asyncio.get_running_loop()
        self.stops, self.left, self.ends = 0, seconds, self.loop.time() + seconds
        self.timer: asyncio.TimerHandle | None = None
        self._set()

    def __enter__(self) -> None:
        if not self.stops:
            self.left = self.ends - self.loop.time()
        self.stops += 1

    def __exit__(self, *_: object) -> None:
        self.stops -= 1
        if not self.stops:
            self.ends = self.loop.time() + self.left
            if self.timer is None:
                self._set()

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _set(self) -> None:
        self.timer = self.loop.call_at(self.ends, self._on_timer) if self.ends < math.inf else None

    def _on_timer(self) -> None:
        self.timer = None
        if self.stops:
            return
        if self.loop.time() < self.ends:
            self._set()
            return
        with suppress(RuntimeError):  # it is over already
            self.timeout.reschedule(self.ends)


CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


class OutOfTime(TimeoutError):
    """Raised by :func:`own_time`; any other TimeoutError comes from the work inside it."""


@asynccontextmanager
async def own_time(seconds: float) -> AsyncIterator[None]:
    """Raises OutOfTime if the block takes longer; time spent in :func:`waiting_for_others`, in any of its tasks, does not
    count."""
    timeout = asyncio.timeout(None)
    clock = Clock(timeout, seconds)
    token = CLOCK.set(clock)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise OutOfTime from None
    finally:
        clock.cancel()
        CLOCK.reset(token)


NOT_PAUSED = nullcontext()


def waiting_for_others() -> AbstractContextManager[None]:
    """Stops the clock of :func:`own_time`. The other side needs its own deadline."""
    return CLOCK.get() or NOT_PAUSED


class HangsError(TimeoutError):
    """Raised where the other side answers no request."""


BEAT_S = 1.0


class LoopTime:
    """Time during which the event loop was free: it stops while the loop is blocked for more than a beat."""

    def __init__(self, beat: float, on_beat: Callable[[], object]) -> None:
        self.beat, self.blocked, self.on_beat = beat, 0.0, on_beat
        self.timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.blocked

    def start(self) -> None:
        """Blocking is detected until :meth:`stop`."""
        loop = asyncio.get_running_loop()
        self.timer = loop.call_at(loop.time() + self.beat, self._beat)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _beat(self) -> None:
        assert self.timer is not None
        self.blocked += asyncio.get_running_loop().time() - self.timer.when()
        self.start()
        self.on_beat()


class Watch:
    """Detects servers that answer no request: a queue may be long, as long as it moves. A blocked loop receives no answers,
    so its time does not count.

    One timer serves all callers: a task and a timer per request would cost more than the rest of a small turn.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.heard = seconds, -math.inf
        self.asking: dict[asyncio.Task, float] = {}
        """Time at which each caller asked."""
        self.given_up: set[asyncio.Task] = set()
        self.time = LoopTime(min(BEAT_S, seconds / 20), self._give_up_late_callers)

    async def answer(self, asked: Awaitable[T]) -> T:
        """Await an answer. Raises HangsError if no caller of this watch has had any answer for ``seconds``."""
        caller = asyncio.current_task()
        assert caller is not None and caller not in self.asking, "one answer at a time"
        cancellations = caller.cancelling()
        if not self.asking:
            self.time.start()
        self.asking[caller] = self.time.now()
        try:
            result = await asked
        except asyncio.CancelledError:
            if caller in self.given_up and caller.cancelling() == cancellations + 1:
                raise HangsError(f"no request was answered for {self.seconds:g} s") from None
            raise
        except Exception:
            if caller in self.given_up:  # a request that turns its cancellation into an error of its own
                raise HangsError(f"no request was answered for {self.seconds:g} s") from None
            self.heard = self.time.now()
            raise
        else:
            self.heard = self.time.now()
            return result
        finally:
            self._leave(caller)

    def _leave(self, caller: asyncio.Task) -> None:
        del self.asking[caller]
        if caller in self.given_up:
            self.given_up.remove(caller)
            caller.uncancel()
        if not self.asking:
            self.time.stop()

    def _give_up_late_callers(self) -> None:
        """Give up the callers that have waited too long."""
        latest = self.time.now() - self.seconds
        if self.heard > latest:
            return
        for caller, begun in self.asking.items():
            if begun <= latest and caller not in self.given_up:
                self.given_up.add(caller)
                caller.cancel()
