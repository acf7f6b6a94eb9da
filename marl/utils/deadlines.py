"""No wait without an end."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """Wait, but not for ever. Raises TimeoutError that names what was waited for, and the key that sets the limit."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        raise TimeoutError(
            f"{what} did not end within {seconds:g} s; if it only needs longer, raise resources.timeout_s"
        ) from None


@contextmanager
def interrupted(seconds: float, error: Exception) -> Iterator[None]:
    """Raise ``error`` inside code that blocks the main thread for so long; elsewhere there are no signals, and no limit.

    Code that sets an alarm of its own takes this one away, and nothing worse.
    """
    if threading.current_thread() is not threading.main_thread() or not seconds < threading.TIMEOUT_MAX:
        yield
        return

    def ring(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
