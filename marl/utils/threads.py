"""A thread that nobody waits for at the end of the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(name: str, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Do some work in a thread of its own. Unlike those of a pool, one that never returns does not keep the interpreter from its
    end."""
    done: Future[Any] = Future()

    def do() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=do, name=name, daemon=True).start()
    return done
