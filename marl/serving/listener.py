"""The HTTP server, and the signals that end it."""

import asyncio
import logging
import resource
import signal
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE_S = 10
"""Seconds that answers under way at a signal may still take."""
REQUEST_S = 30
"""Seconds for a client to send a request, header and body."""
MOST_CONNECTIONS = 10_000
RECEIVING: tuple[Any, ...] = (h11.IDLE, h11.SEND_BODY)
"""States of a client that has not sent its request whole."""


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for the traceback of an answer that the server's end cuts off: uvicorn says how many there are in a line of its own."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class Connection(H11Protocol):
    """A client. It has ``REQUEST_S`` for each request, from its connection or a request's first byte to its last one."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self.make_room()
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.rest()
        super().connection_lost(exc)

    def make_room(self) -> None:
        """End the connection that has waited longest for its client, or this one where all others are being answered."""
        clients = [client for client in self.connections if isinstance(client, Connection) and client is not self]
        others = [client for client in clients if client.conn.their_state in RECEIVING]
        last = min(others, key=lambda other: other.deadline.when() if other.deadline else 0.0, default=self)
        self.connections.discard(last)  # which its end would do later
        last.transport.abort()

    def watch(self) -> None:
        if self.conn.their_state not in RECEIVING:
            self.rest()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def rest(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = None


def most_connections() -> int:
    """Connections at the same time: half of the files that the process may open."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def settings(app: Any, **further: Any) -> uvicorn.Config:
    """uvicorn's, without what this server does not speak."""
    given: dict[str, Any] = {
        "lifespan": "off",
        "ws": "none",
        "log_level": "warning",
        "timeout_graceful_shutdown": GRACE_S,
    } | further
    return uvicorn.Config(app, http=Connection, **given)


class Listener(uvicorn.Server):
    """``run`` returns after SIGTERM, and raises KeyboardInterrupt after SIGINT, also where a shell started it with SIGINT ignored."""

    def __init__(self, app: Any) -> None:
        super().__init__(settings(app))
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
