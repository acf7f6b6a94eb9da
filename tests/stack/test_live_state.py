"""States that are written where they lie: what is in the file is what was there before the change, and a change waits for memory,
never for the disk."""

import io
import os
import threading
import time
from functools import partial

import pytest
import torch

from marl.cluster.workers import live_state
from marl.cluster.workers.live_state import SAMPLE, SMALL, LiveState
from marl.cluster.workers.whole_model import copy_of

SIZE = 300_000


@pytest.fixture
def tensors():
    return {"weights": torch.arange(float(SIZE)), "moments": [torch.ones(SIZE), torch.tensor(3.0)], "step": 7}


@pytest.fixture
def state(tensors):
    return LiveState(tensors, partial(copy_of, copies={}))


@pytest.fixture
def disk(monkeypatch):
    """Writes are small; from the second on they wait for ``gate``, and those from memory for ``later``."""
    gate, later, begun, writes = threading.Event(), threading.Event(), threading.Event(), []
    real = live_state._write_whole

    def slow(write, content):
        writes.append(len(content))
        if len(writes) > 1:
            begun.set()
            assert (later if isinstance(content, bytes) else gate).wait(20)
        return real(write, content)

    monkeypatch.setattr(live_state, "_write_whole", slow)
    monkeypatch.setattr(live_state, "PIECE", 1 << 16)
    return gate, later, begun


def change(tensors):
    tensors["weights"].add_(1.0)
    tensors["moments"][0].zero_()


def holds_what_was_there(path):
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["weights"], torch.arange(float(SIZE))) and bool((found["moments"][0] == 1).all())
    return found["moments"][1] == 3 and found["step"] == 7


def test_a_state_is_written_without_a_copy_as_torch_writes_it(state, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(state, "copy", None)
    state.write(str(tmp_path / "ours"))
    assert not state.is_live and state.state is None
    state.release()
    torch.save(tensors, torchs := io.BytesIO())
    assert (tmp_path / "ours").read_bytes() == torchs.getvalue() and holds_what_was_there(tmp_path / "ours")


def test_a_state_that_changes_before_it_is_written_is_copied(state, tensors, tmp_path):
    state.release()
    change(tensors)
    state.write(str(tmp_path / "file"))
    assert holds_what_was_there(tmp_path / "file")


def test_a_change_in_the_middle_of_a_write_waits_for_memory_and_not_for_the_disk(state, tensors, tmp_path, disk):
    gate, later, begun = disk
    writer = threading.Thread(target=state.write, args=[str(tmp_path / "file")])
    writer.start()
    assert begun.wait(20)
    released = threading.Thread(target=state.release)
    released.start()
    time.sleep(0.05)
    assert released.is_alive(), "the piece that the disk is taking is still read"
    gate.set()
    released.join(20)
    assert not released.is_alive() and writer.is_alive()
    change(tensors)
    later.set()
    writer.join(20)
    assert holds_what_was_there(tmp_path / "file")


def test_a_disk_that_takes_nothing_ends_the_wait(state, tmp_path, disk, monkeypatch):
    gate, later, begun = disk
    monkeypatch.setattr(live_state, "STUCK_S", 0.05)
    writer = threading.Thread(target=state.write, args=[str(tmp_path / "file")])
    writer.start()
    assert begun.wait(20)
    with pytest.raises(TimeoutError, match="accepted nothing for 0 s.*save_in_background=false"):
        state.release()
    for event in (gate, later):
        event.set()
    writer.join(20)


@pytest.mark.parametrize(
    "begin", [lambda state, path: state.write(path), lambda state, path: state.copied()], ids=["write", "copy"]
)
def test_a_change_without_a_release_is_an_error_of_the_save(state, tensors, tmp_path, begin):
    change(tensors)
    with pytest.raises(RuntimeError, match="changed while a checkpoint was reading them"):
        begin(state, str(tmp_path / "file"))


def test_a_copy_of_a_live_state_is_its_readers_own(state, tensors):
    copied = state.copied()
    change(tensors)
    assert torch.equal(copied["weights"], torch.arange(float(SIZE)))
    state.release()


def test_a_part_of_a_larger_storage_is_written_alone(tmp_path):
    """``torch.save`` writes the whole storage of a view."""
    state = LiveState({"part": torch.ones(SIZE)[:10]}, partial(copy_of, copies={}))
    state.write(str(tmp_path / "file"))
    assert os.path.getsize(tmp_path / "file") < SIZE
    assert torch.load(tmp_path / "file", weights_only=True)["part"].shape == (10,)


def test_a_full_disk_is_said_and_nobody_waits_for_it(state, monkeypatch):
    with pytest.raises(OSError, match="No space left on device"):
        state.write("/dev/full")
    assert not state.is_live and state.state is None


def test_a_state_that_is_all_copied_is_neither_copied_again_nor_waited_for(tmp_path, disk):
    """As on an accelerator: weights and moments are copied at once, and step counts are small."""
    gate, _, begun = disk
    kept = {}
    state = LiveState({"weights": torch.ones(SIZE)[:-1], "step": torch.tensor(3.0)}, partial(copy_of, copies=kept))
    before = [tensor.data_ptr() for tensor in state.state.values()]
    state.release()
    assert [tensor.data_ptr() for tensor in state.state.values()] == before and not state.release_waits.is_set()
    writer = threading.Thread(target=state.write, args=[str(tmp_path / "file")])
    writer.start()
    assert begun.wait(20)
    state.release()  # at once, though the disk is taking a piece
    gate.set()
    writer.join(20)
    assert torch.load(tmp_path / "file", weights_only=True)["step"] == 3


def test_a_copied_state_goes_to_the_disk_and_not_through_memory(state, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(live_state, "_write_whole", lambda _, content: written.append(type(content)) or len(content))
    state.release()
    state.write(str(tmp_path / "file"))
    assert set(written) == {memoryview}


def of_sizes(*sizes):
    tensors = [torch.arange(size, dtype=torch.uint8) for size in sizes]
    return tensors, LiveState(tensors, torch.clone)


@pytest.mark.parametrize("size", [SMALL + 1, SMALL + 2, 5 * SMALL + 3])
def test_a_sample_starts_at_the_middle_of_a_tensor(size):
    (tensor,), state = of_sizes(size)
    (sample,) = state.samples
    assert list(sample) == tensor[size // 2 : size // 2 + SAMPLE].tolist() and len(sample) == SAMPLE


@pytest.mark.parametrize("place", [0, SAMPLE - 1])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_change_within_any_sample_is_an_error(place, changed):
    tensors, state = of_sizes(SMALL + 1, 3 * SMALL, 2 * SMALL)
    tensors[changed][len(tensors[changed]) // 2 + place] += 1
    with pytest.raises(RuntimeError, match="no release before"):
        state.copied()
    assert not state.is_live, "a state that failed holds no tensor"
