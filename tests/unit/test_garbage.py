"""Garbage collection during a run."""

import gc
import weakref

from marl.utils.garbage import frozen_gc


class Node:
    def __init__(self):
        self.itself = self


def test_frozen_objects_are_freed_after_their_run():
    kept = weakref.ref(Node())
    assert kept() is not None, "a cycle waits for a collection"
    with frozen_gc():
        gc.collect()
    assert kept() is None, "garbage is collected before the rest is frozen"

    node = Node()
    kept = weakref.ref(node)
    with frozen_gc():
        del node
        gc.collect()
        assert kept() is not None
    gc.collect()
    assert kept() is None
