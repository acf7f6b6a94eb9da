"""Memory of a long-lived process."""

import gc
from functools import cache


@cache
def freeze_gc() -> None:
    """Take what start-up left behind out of the garbage collector's view, once in a process.

    torch, ray and verl leave a million objects; walking them takes .3 s, a third of a small step, every few steps. What is
    frozen is never collected: a process that has one run after another freezes before the first of them begins.
    """
    gc.collect()
    gc.freeze()
