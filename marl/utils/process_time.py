"""Age of this process, by a clock that nobody sets; or of its present run, where one process makes several."""

import time

import psutil

STARTED = [time.monotonic() - (time.time() - psutil.Process().create_time())]
"""The start of the present run; the first one counts from the start of the process, which imported for it."""
BEGUN: list[None] = []
"""An entry for each run of this process."""


def begin_run() -> None:
    """Restart the clock for each later run in this process, as in a sweep."""
    if BEGUN:
        STARTED[0] = time.monotonic()
    BEGUN.append(None)


def process_seconds() -> float:
    return time.monotonic() - STARTED[0]
