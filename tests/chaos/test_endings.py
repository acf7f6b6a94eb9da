"""A run leaves no process, socket or shared memory behind, whatever ends it; what a killed driver leaves, the next run ends."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from marl.utils import segments
from marl.utils.run_mark import MARK
from tests.chaos import drivers
from tests.chaos.drivers import of

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]
START_S, END_S = 240, 90
RUN = (
    "sharing=shared", "trainer.val_before_train=false", "trainer.test_freq=-1", "data.train_batch_size=4", "trainer.logger=[file]",
    "controller.num_workers=1",
)  # fmt: skip
LONG = "trainer.total_training_steps=100000"


@pytest.fixture
def start(cold_assets, tmp_path):
    """Start the command, as a shell does; all that is left of it is killed at the end."""
    begun = []

    def start(name, *words):
        command = (*RUN, f"assets={cold_assets}", *words)
        begun.append(drivers.start(command, tmp_path / name, tmp_path / f"{name}.log"))
        return begun[-1]

    yield start
    for driver in begun:
        drivers.end(driver)


def trained(driver):
    ends = time.monotonic() + START_S
    while not (driver.folder / "metrics.jsonl").exists():
        assert driver.poll() is None and time.monotonic() < ends, driver.log.read_text()[-3000:]
        time.sleep(0.2)
    assert len(of(driver)) > 5, "Ray's processes, a rank, a server, an episode worker"


ENDINGS = {
    "success": (None, 0),
    "ctrl-c": (signal.SIGINT, 130),
    "sigterm": (signal.SIGTERM, 143),
    "error": ("PolicyWorker", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_ending_leaves_anything(start, monkeypatch, ending):
    does, code = ENDINGS[ending]
    words = ("trainer.total_training_steps=10",) if does is None else (LONG, "resources.max_restarts=0")
    driver = start(ending, *words)
    trained(driver)
    (session,), segment = sessions_of(driver), segment_of(driver, monkeypatch)
    assert [*session.glob("sockets/*")] and segment.exists()
    if does is not None:
        end(driver, does)
    began = time.monotonic()
    assert driver.wait(timeout=START_S if does is None else END_S) == code, driver.log.read_text()[-3000:]
    print(f"\n{ending}: ended in {time.monotonic() - began:.1f} s")
    assert not of(driver), [process.cmdline() for process in of(driver)]
    assert not [*session.glob("sockets/*")] and not segment.exists()


def end(driver, does):
    if isinstance(does, str):
        next(process for process in of(driver) if does in process.cmdline()[0]).kill()
    else:
        os.kill(driver.pid, does)


def test_without_rays_head_the_driver_ends_too(start):
    """Ray ends it; the same command goes on."""
    driver = start("headless", LONG, "trainer.save_freq=1")
    trained(driver)
    end(driver, "gcs_server")
    began = time.monotonic()
    code = driver.wait(timeout=2 * END_S)
    print(f"\nhead: exit code {code} after {time.monotonic() - began:.1f} s; {driver.log.read_text()[-300:]}")
    time.sleep(6)
    assert code != 0 and not of(driver)


def segment_of(driver, monkeypatch):
    """Shared memory that a rank of the run has noted, as for a transfer of weights, and not removed."""
    rank = next(process for process in of(driver) if "PolicyWorker" in process.cmdline()[0])
    segment = Path(f"/dev/shm/verl_weights_test_{driver.pid}")
    segment.write_bytes(b"0" * 4096)
    with monkeypatch.context() as rank_of_it:
        rank_of_it.setenv(MARK, rank.environ()[MARK])
        segments.note(segment.name)
    return segment


def sessions_of(driver):
    """Ray's folder of the driver's session."""
    words = (word for process in of(driver) for word in process.cmdline())
    return {Path(word.partition("=")[2]) for word in words if word.startswith("--session_dir=")}


def test_the_next_run_ends_what_a_killed_driver_left(start, monkeypatch):
    """Ray's own processes end with the driver, stopped ones at times; a child of theirs, as an engine has, may stay."""
    driver = start("killed", LONG, "trainer.save_freq=1")
    trained(driver)
    rank = next(process for process in of(driver) if "PolicyWorker" in process.cmdline()[0])
    child = psutil.Popen(["sleep", "300"], env=rank.environ(), start_new_session=True)
    segment = segment_of(driver, monkeypatch)
    rank.suspend()
    driver.kill()
    driver.wait()
    time.sleep(5)
    assert child in of(driver)
    (session,) = {
        path.parents[1] for path in Path("/tmp/ray").glob("session_*/sockets/raylet") if f"_{driver.pid}/" in str(path)
    }
    os.utime(session / "sockets" / "raylet", (0, 0))  # as if it had been there for long
    other = start("other", "resources.one_process=true", "controller.num_workers=0", "trainer.total_training_steps=1")
    assert other.wait(timeout=START_S) == 0, other.log.read_text()[-3000:]
    assert (
        child.wait(timeout=5) == -signal.SIGKILL
        and not of(driver)
        and not segment.exists()
        and not (session / "sockets").exists()
    )
