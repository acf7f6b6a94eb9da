"""A run that SIGTERM ends, as a batch system does."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from marl.utils.threads import in_thread

GRACE_S = 5.0
"""An event loop that SIGTERM finds blocked is interrupted after this time."""


class Terminated(KeyboardInterrupt):
    """SIGTERM asked the run to end."""


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C, and with it SIGTERM, end a block that waits without the event loop: asyncio would only mark its task, which
    does not notice before the block has ended. An interrupt that is ignored stays so."""
    asyncios = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or asyncios is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, asyncios)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that everything is stopped in order. Raises Terminated then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, noticed = False, threading.Event()

    def end(*_: object) -> None:
        nonlocal asked
        asked = True
        with suppress(RuntimeError):  # asyncio only marks its task, which never notices where code blocks the loop
            asyncio.get_running_loop().call_soon_threadsafe(noticed.set)
            in_thread("SIGTERM", interrupt_unless, noticed)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if asked:
            raise Terminated from None
        raise
    finally:
        noticed.set()
        for which, handler in before.items():
            signal.signal(which, handler)


def interrupt_unless(noticed: threading.Event) -> None:
    """Interrupt the main thread, as a second Ctrl-C would."""
    if not noticed.wait(GRACE_S):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
