"""Age of this process, by a clock that nobody sets."""

import time

import psutil

STARTED = time.monotonic() - (time.time() - psutil.Process().create_time())


def process_seconds() -> float:
    return time.monotonic() - STARTED
