"""Code that blocks the event loop is interrupted: no other deadline can pass there."""

import asyncio
import re
import signal
import time
from types import SimpleNamespace

import pytest

from marl import main
from marl.utils import deadlines
from marl.utils.deadlines import DeadlinePassed, LoopAlarm
from marl.utils.run_mark import MARK

CALLS = []


def alarm(seconds=0.3):
    CALLS.clear()
    return LoopAlarm(seconds, "a call that blocks", "controller.episode_timeout_s", lambda: CALLS.append(1))


async def beside(alarm, work):
    """In a task of its own, as an episode is."""

    async def task():
        await asyncio.sleep(0)
        return work()

    async with alarm.beats():
        return await asyncio.gather(task(), asyncio.sleep(0.01))


def catastrophic():
    re.fullmatch(r"(a+)+b", "a" * 40)


@pytest.mark.parametrize("work", [lambda: time.sleep(30), catastrophic], ids=["sleep", "regex"])
def test_a_loop_that_is_blocked_is_interrupted_and_the_deadline_named(work):
    """A regular expression holds the interpreter's lock as well."""
    began, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    words = "a call that blocks did not end within 0.3 s; if it only needs longer, raise controller.episode_timeout_s"
    with pytest.raises(DeadlinePassed, match=words), alarm() as watch:
        asyncio.run(beside(watch, work))
    assert time.monotonic() - began < 3 and CALLS == [1]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_loop_that_comes_by_goes_on_for_longer(monkeypatch):
    monkeypatch.setattr(deadlines, "BEAT_S", 0.05)

    async def run(watch):
        async with watch.beats():
            for _ in range(8):
                time.sleep(0.1)
                await asyncio.sleep(0.02)

    with alarm() as watch:
        asyncio.run(run(watch))
    assert not CALLS


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_other_errors_stay_what_they_are(error):
    def fails():
        raise error("own")

    with pytest.raises(error, match="own"), alarm() as watch:
        asyncio.run(beside(watch, fails))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_error_of_the_stacks_keeps_nobody_from_being_interrupted():
    watch = LoopAlarm(0.2, "a call", "key", lambda: 1 / 0)
    with pytest.raises(DeadlinePassed), watch:
        asyncio.run(beside(watch, lambda: time.sleep(30)))


def test_a_run_through_ray_leaves_stacks_and_one_process_has_no_alarm(tmp_path, monkeypatch):
    monkeypatch.delenv(MARK, raising=False)
    resources, controller = SimpleNamespace(one_process=False), SimpleNamespace(episode_timeout_s=0.2)
    trainer = SimpleNamespace(default_local_dir=str(tmp_path))
    config = SimpleNamespace(resources=resources, controller=controller, trainer=trainer)
    words = "waits without await.*controller.num_workers=1"
    with pytest.raises(DeadlinePassed, match=words), main.blocked_alarm(config) as watch:
        asyncio.run(beside(watch, lambda: time.sleep(30)))
    (stacks,) = (tmp_path / "stacks").rglob("driver_*.txt")
    assert "test_loop_alarm.py" in stacks.read_text(), "where it waited"
    resources.one_process = True
    assert main.blocked_alarm(config).seconds > 1e6
