"""Memory of a long-lived process."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""True between freezing and the end of :func:`frozen_gc`. ``gc.get_freeze_count`` would walk a million objects to tell."""


def freeze_gc(collect: bool = True) -> None:
    """Exclude the objects created at start-up from garbage collection; nothing to do where this was done before.

    ``collect=False`` freezes the garbage of imports with them: a few megabytes, where finding it takes .3 s.

    torch, ray and verl create a million objects; walking them takes .3 s, a third of a small step, every few steps. Frozen
    objects are not collected until :func:`frozen_gc` ends: a process that runs several runs freezes before each one begins.
    """
    global _frozen
    if not _frozen:
        if collect:
            gc.collect()
        gc.freeze()
        _frozen = True


SHARE = 0.01
"""Largest share of the time that :func:`collect_garbage` takes."""
_next = 0.0


def collect_garbage() -> None:
    """Collect cyclic garbage, unless that would take more than ``SHARE`` of the time: to be called wherever much has just ended.

    Python counts objects, not their bytes: it would let gigabytes of tensors wait for a hundred thousand lists.
    """
    global _next
    started = time.monotonic()
    if started >= _next:
        gc.collect()
        ended = time.monotonic()
        _next = ended + (ended - started) / SHARE


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude everything that exists now from garbage collection inside the context; afterwards it can be freed."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = True
    try:
        yield
    finally:
        gc.unfreeze()
        _frozen = False
