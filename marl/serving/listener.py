"""The HTTP server, and the signals that end it."""

import asyncio
import logging
import signal
from types import FrameType
from typing import Any

import uvicorn

GRACE_S = 10
"""Seconds that answers under way at a signal may still take."""


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for the traceback of an answer that the server's end cuts off: uvicorn says how many there are in a line of its own."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class Listener(uvicorn.Server):
    """``run`` returns after SIGTERM, and raises KeyboardInterrupt after SIGINT, also where a shell started it with SIGINT ignored."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=GRACE_S))
        self.interrupted = False
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)  # configured by the line before

    def listen_to_signals(self) -> None:
        """Listen from now on, not only within ``run``; afterwards uvicorn raises the signals that ended it again, for the handlers
        installed before."""
        for which in (signal.SIGINT, signal.SIGTERM):
            signal.signal(which, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    def run(self, sockets: list[Any] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # it may still end what stops workers and servers
        if self.interrupted:
            raise KeyboardInterrupt
