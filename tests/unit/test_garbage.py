"""Garbage collection during a run."""

import gc
import subprocess
import sys
import weakref

import pytest

from marl.utils import garbage
from marl.utils.garbage import collect_garbage, freeze_gc, frozen_gc


@pytest.mark.parametrize(("given", "found"), [((700, 10, 10), (50_000, 100, 50)), ((900, 10, 10), (900, 10, 10))])
def test_a_threshold_of_ones_own_is_kept(given, found):
    program = f"import gc; gc.set_threshold(*{given}); import marl; print(gc.get_threshold())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(found)


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


@pytest.mark.slow
def test_garbage_of_imports_is_frozen_unseen_and_freed_after_the_run():
    walks = []
    with frozen_gc():
        pass
    kept = weakref.ref(Node())
    gc.callbacks.append(watch := lambda phase, info: walks.append(info["generation"]))
    try:
        freeze_gc(collect=False)
    finally:
        gc.callbacks.remove(watch)
    assert 2 not in walks and kept() is not None and gc.get_freeze_count() > 10_000
    with frozen_gc():
        pass
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_a_run_after_another_one_begins_with_frozen_objects():
    """The first run thaws everything at its end: a collection of the second one would walk all imports again."""
    freeze_gc()
    with frozen_gc():
        pass
    assert gc.get_freeze_count() == 0
    freeze_gc()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    freeze_gc()
    assert gc.get_freeze_count() == frozen, "what came later can be freed"


def test_collecting_takes_no_more_than_its_share_of_the_time(monkeypatch):
    now, walks = [1000.0], []
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(garbage.gc, "collect", lambda: (walks.append(now[0]), now.__setitem__(0, now[0] + 0.02)))
    monkeypatch.setattr(garbage, "_next", 0.0)
    for _ in range(1000):
        collect_garbage()
        now[0] += 0.01
    assert walks[0] == 1000.0 and len(walks) == 5, "at most every two seconds"
