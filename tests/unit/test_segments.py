"""Shared memory that a killed run left is removed where the run noted it, and nobody else's."""

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest

from marl.cluster.processes import end_orphans
from marl.utils import segments
from marl.utils.run_mark import MARK, new_mark, own_name

HOLDS = """
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
one = SharedMemory({name!r}, create={create}, size=4096)
resource_tracker.unregister(one._name, "shared_memory")  # a killed engine's tracker is killed with it
print(one.name, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def notes(monkeypatch, tmp_path):
    monkeypatch.setattr(segments, "NOTES", tmp_path / "notes")
    return tmp_path / "notes"


@pytest.fixture
def hold():
    """Start a process that makes a segment, or opens one; its name and the process."""
    started = []

    def hold(name=None, create=True):
        code = HOLDS.format(name=name, create=create)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append((segments.SHARED_MEMORY / process.stdout.readline().strip(), process))
        return started[-1]

    yield hold
    for segment, process in started:
        end(process)
        segment.unlink(missing_ok=True)


def end(process):
    process.kill()
    process.wait()


def of_a_dead_driver():
    where, pid, start = own_name().rsplit("/", 2)
    return f"{where}/{pid}/9{start}/abc"


def test_what_a_killed_runs_engine_had_open_is_removed(hold, monkeypatch):
    monkeypatch.setenv(MARK, of_a_dead_driver())
    noted, engine = hold()
    segments.note_mapped()
    other, stranger = hold()
    end(engine), end(stranger)
    assert noted.exists() and noted.name.startswith("psm_")
    end_orphans()
    assert not noted.exists() and other.exists(), "nobody noted the other one: it may be another container's"


def test_a_segment_that_somebody_has_open_stays_until_he_is_gone(hold, monkeypatch):
    monkeypatch.setenv(MARK, of_a_dead_driver())
    segment, engine = hold()
    segments.note_mapped()
    _, reader = hold(segment.name, create=False)
    end(engine)
    segments.remove_of_the_dead()
    assert segment.exists()
    end(reader)
    segments.remove_of_the_dead()
    assert not segment.exists()


def test_anothers_notes_are_not_read(monkeypatch, notes, tmp_path):
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv(MARK, of_a_dead_driver())
    segment = tmp_path / "psm_1"
    segment.touch()
    segments.note(segment.name)
    notes.rename(tmp_path / "theirs")
    notes.symlink_to(tmp_path / "theirs")
    segments.note(segment.name)
    segments.remove_of_the_dead()
    assert segment.exists()


def test_a_living_runs_segments_stay_and_its_own_end_removes_them(hold, monkeypatch, notes):
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    segment, engine = hold()
    segments.note(segment.name)
    end(engine)
    segments.remove_of_the_dead()
    assert segment.exists()
    segments.remove(mark)
    assert not segment.exists() and not list(notes.glob("*@*"))


@pytest.mark.parametrize("where", ["elsewhere", "another boot"])
def test_runs_of_other_places_are_left_alone(hold, monkeypatch, where):
    host, _, rest = of_a_dead_driver().partition("/")
    monkeypatch.setenv(MARK, f"{where}/{rest}" if where == "elsewhere" else f"{host}/0{rest}")
    segment, engine = hold()
    segments.note(segment.name)
    end(engine)
    segments.remove_of_the_dead()
    assert segment.exists()


def test_a_later_segment_of_the_same_name_stays(hold, monkeypatch):
    monkeypatch.setenv(MARK, of_a_dead_driver())
    segment, engine = hold()
    segments.note(segment.name)
    end(engine)
    keeps = SharedMemory("psm_" + os.urandom(4).hex(), create=True, size=8)  # takes the number that is free next
    segment.unlink()
    end(hold(segment.name)[1])
    segments.remove_of_the_dead()
    assert segment.exists()
    keeps.close(), keeps.unlink()


def test_files_of_other_kinds_are_never_noted(monkeypatch, notes, tmp_path):
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv(MARK, of_a_dead_driver())
    for name in ("model", "verl_weights_1", "../outside"):
        (tmp_path / name).touch()
    segments.note("model", "verl_weights_1", "../outside", "psm_gone")
    (record,) = notes.glob("*@*")
    assert [line.split()[0] for line in record.read_text().splitlines()] == ["verl_weights_1"]
    segments.remove_of_the_dead()
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"model"} and not list(notes.iterdir())


def test_notes_of_segments_that_are_gone_are_forgotten(monkeypatch, notes, tmp_path):
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv(MARK, new_mark())
    for step in range(3):
        segment = tmp_path / f"verl_weights_{step}"
        segment.touch()
        segments.note(segment.name)
        segment.unlink()
    (record,) = notes.glob("*@*")
    assert len(record.read_text().splitlines()) == 1


def test_without_a_run_nothing_is_noted(monkeypatch, notes):
    monkeypatch.delenv(MARK, raising=False)
    segments.note("psm_1")
    assert not notes.exists()
