"""The thread in which a team plays, beside the thread that answers HTTP."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SECONDS = 30.0


class Host:
    """Runs coroutines on the team's loop for callers on another one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """An awaitable of the caller's loop; to cancel it is to cancel the work."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


@contextmanager
def hosted(loop: asyncio.AbstractEventLoop) -> Iterator[Host]:
    """The loop runs in a thread of its own for as long as the block lasts; what it still works on at the end is cancelled."""
    thread = threading.Thread(target=loop.run_forever, name="team", daemon=True)
    thread.start()
    try:
        yield Host(loop)
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(STOP_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_SECONDS)


async def cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
