"""CPU seconds of the main thread by what it was doing: the stack is looked at every few milliseconds of CPU time.

Each sample is weighted by the CPU time since the previous one, so that long C calls are counted in full.
"""

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S = 0.002
Place = tuple[str, str]
"""File and function of a frame."""
OUTER = (
    ("sampling", "/marl/rollout/decoding.py", "step"),
    ("sampling", "/marl/rollout/decoding.py", "_leave"),
    ("weight sync", "/marl/cluster/local.py", "sync_weights"),
    ("backward", "/torch/_tensor.py", "backward"),
    ("optimizer", "/verl/workers/engine/", "optimizer_step"),
    ("optimizer", "/verl/workers/engine/", "optimizer_zero_grad"),
    ("forward", "/transformers/models/", "forward"),
)
"""Work that includes whatever it calls: category, part of the file's path, function."""


def root_of(package: str) -> str:
    """The folder of a package, which is not imported."""
    found = find_spec(package)
    assert found is not None and found.submodule_search_locations
    return f"{found.submodule_search_locations[0]}/"


OWNERS = {root_of("verl"): "verl", root_of("marl"): "ours"}
"""Owners of the time while nothing of the above runs: the innermost of these."""
OTHER = "other"
"""The event loop, for the most part."""


class Sampler:
    """Within :meth:`on`, sums up CPU seconds by category and by the innermost function of verl's or ours."""

    def __init__(self) -> None:
        self.seconds: Any = Counter()
        self.functions: Any = Counter()
        """Seconds by category and ``file:function``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        before = signal.signal(signal.SIGPROF, self._look)
        self.last = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S)
        try:
            yield
        finally:
            signal.signal(signal.SIGPROF, signal.SIG_IGN)  # a last look would start the timer again
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _look(self, _: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        places = stack(frame)
        category, place = category_of(places), owner_of(places)
        self.seconds[category] += now - self.last
        self.functions[category, label(place)] += now - self.last
        self.last = time.thread_time()  # looking is not counted
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S)


def stack(frame: Any) -> list[Place]:
    """From the innermost frame outwards."""
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return places


def category_of(places: Sequence[Place]) -> str:
    """The outermost work of ``OUTER``, else the innermost owner."""
    for file, function in reversed(places):
        for category, part, name in OUTER:
            if function == name and part in file:
                return category
    place = owner_of(places)
    return OWNERS[owner_folder(place[0])] if place else OTHER


def owner_of(places: Sequence[Place]) -> Place | None:
    """The innermost frame of verl's or ours."""
    return next((place for place in places if owner_folder(place[0])), None)


def owner_folder(file: str) -> str:
    return next((folder for folder in OWNERS if file.startswith(folder)), "")


def label(place: Place | None) -> str:
    if place is None:
        return OTHER
    file, function = place
    folder = Path(owner_folder(file))
    return f"{Path(file).relative_to(folder.parent)}:{function}"
