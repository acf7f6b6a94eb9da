"""Output into a pipe whose reader leaves early, as ``head`` does."""

import os
import select
import sys
from contextlib import suppress


def reader_left() -> bool:
    """True where nobody reads stdout any more; what is still printed, also by Python at its exit, then goes nowhere
    (https://docs.python.org/3/library/signal.html#note-on-sigpipe)."""
    left = has_no_reader(sys.stdout)
    for stream in (sys.stdout, sys.stderr) if left else ():
        if has_no_reader(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return left


def has_no_reader(stream: object) -> bool:
    with suppress(AttributeError, OSError, ValueError):  # no stream, no file, closed
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # type: ignore[attr-defined]
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False
