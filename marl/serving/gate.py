"""Admission: so many episodes are played at once, so many wait, and more are refused."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from marl.serving.refusals import Refused


class Gate:
    def __init__(self, concurrent: int, queue: int) -> None:
        self.concurrent, self.queue = concurrent, queue
        self.admitted = self.playing = 0
        self._places = asyncio.Semaphore(concurrent)

    @property
    def waiting(self) -> int:
        return self.admitted - self.playing

    @contextmanager
    def admit(self, episodes: int) -> Iterator[None]:
        """Let a request in. Raises Refused where it, with those that are in, is more than are played and may wait."""
        most = self.concurrent + self.queue
        if episodes > most:
            raise Refused(
                400,
                f"n={episodes}: this server plays and queues at most {most} episodes; ask for fewer",
                "invalid_value",
                "n",
            )
        if self.admitted + episodes > most:
            raise Refused(
                429,
                f"the queue is full: {self.playing} episodes are played and {self.waiting} wait, of at most {self.concurrent} and "
                f"{self.queue}; ask again later, or serve with a larger --queue or --max-concurrent",
                "queue_full",
            )
        self.admitted += episodes
        try:
            yield
        finally:
            self.admitted -= episodes

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until one more episode may be played."""
        async with self._places:
            self.playing += 1
            try:
                yield
            finally:
                self.playing -= 1
