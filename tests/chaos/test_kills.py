"""Kills inside a save: whatever is found afterwards is whole, and no older than the last save that had ended."""

import os
import random
import select
import signal
import time

import pytest
import torch

from marl import checkpoint
from marl.utils import folders
from marl.utils.manifest import MANIFEST, verify
from tests.chaos import forks, saver

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]
KILLS = 200
CALLS = ("fsync", "replace", "open", "unlink", "rmdir", "mkdir", "scandir")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # a fork has none of torch's others


def read_within(descriptor, seconds):
    return os.read(descriptor, 1) if select.select([descriptor], [], [], seconds)[0] else b""


def kill_inside_a_save(root, first, rng, duration):
    """Kill a saver at a random moment of a save. Returns the step that was being saved, or None if it had ended by then."""
    hear, told = os.pipe()
    child = forks.forked(lambda: saver.saves_on(root, first, told))
    os.close(told)
    step = first + rng.randrange(2)
    for _ in range(2 * (step - first) + 1):
        assert read_within(hear, 30.0), "the saver ended"
    ended = read_within(hear, rng.uniform(0, duration))
    forks.end(child)
    ended = ended or os.read(hear, 1)
    os.close(hear)
    return None if ended else step


def must_be_whole(root, at_least):
    """The newest checkpoint is whole and of its step; also one with a manifest under a temporary name."""
    folders.clean(root)
    folder, refused = folders.newest_valid(root, saver.FAMILY)
    step = 0 if folder is None else int(folder.name.rsplit("_", 1)[1])
    assert not refused and step >= at_least
    if folder is not None:
        assert saver.holds(folder, step)
        tracked = int((root / folders.TRACKER).read_text()) if (root / folders.TRACKER).exists() else 0
        assert tracked in (step, step - 1)
    return step


def test_200_kills_inside_a_save(tmp_path):
    rng, newest, inside, ended = random.Random(0), 0, 0, 0
    began = time.monotonic()
    saver.save(tmp_path, 1)
    saver.save(tmp_path, 1)
    duration = (time.monotonic() - began) / 2
    new = 0
    while inside < KILLS:
        step = kill_inside_a_save(tmp_path, newest + 1, rng, 1.2 * duration)
        found = must_be_whole(tmp_path, newest if step is None else step - 1)
        inside, ended, new = inside + (step is not None), ended + (step is None), new + (found == step)
        newest = found
        assert (
            len(folders.named(tmp_path)) <= 4
        )  # the last two, the best, and one more, as the kill was after its rename
        checkpoint.settle(tmp_path, newest, saver.KEPT)  # as a run does that goes on
        assert len(folders.named(tmp_path)) <= 3
    print(f"\n{inside} kills inside a save of {duration * 1000:.0f} ms ({new} after its rename), {ended} between two")
    assert new < inside


def killed_at(root, call, name):
    """Save step 2 in a process that kills itself before its ``call``-th call of ``os.<name>``. Returns True if it did."""

    def work():
        plain, seen = getattr(os, name), 0

        def counted(*arguments, **options):
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments, **options)

        setattr(os, name, counted)
        saver.save(root, 2)

    _, status = os.waitpid(forks.forked(work), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("again", [False, True], ids=["new", "over one of the same step"])
@pytest.mark.parametrize("name", CALLS)
def test_a_kill_before_every_call(tmp_path, name, again):
    """Every point at which the disk changes."""
    call = 1
    while True:
        root = tmp_path / str(call)
        saver.save(root, 1)
        if again:
            saver.save(root, 2)
        dies = killed_at(root, call, name)
        for folder in root.glob(".*_global_step_*"):
            if (folder / MANIFEST).exists() and not folder.name.startswith(folders.ASIDE):
                verify(folder)
        step = must_be_whole(root, 2 if again else 1)
        if not dies:
            assert (step == 2 and call > 1) or name in ("open", "unlink", "rmdir", "scandir")
            break
        call += 1
    print(f"\n{call - 1} kills at os.{name}")
