"""Code that blocks the event loop is interrupted: no other deadline can pass there."""

import asyncio
import contextvars
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from marl import main
from marl.runners import Runner
from marl.utils import deadlines
from marl.utils.deadlines import DeadlinePassed, LoopAlarm, interruptible
from marl.utils.run_mark import MARK
from tests.builders import collected, controller

CALLS = []


def alarm(seconds=0.3):
    CALLS.clear()
    return LoopAlarm(seconds, "a call that blocks", "controller.episode_timeout_s", lambda: CALLS.append(1))


async def beside(work):
    """In a task of its own, as an episode is."""

    async def task():
        await asyncio.sleep(0)
        return work()

    async with interruptible():
        return await asyncio.gather(task(), asyncio.sleep(0.01))


def catastrophic():
    re.fullmatch(r"(a+)+b", "a" * 40)


@pytest.fixture(autouse=True)
def no_timer_of_pytests():
    """Its deadline of a test is an alarm too, and comes back."""
    handler, left = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)[0]
    yield
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.setitimer(signal.ITIMER_REAL, left)


@pytest.mark.parametrize("work", [lambda: time.sleep(30), catastrophic], ids=["sleep", "regex"])
def test_a_loop_that_is_blocked_is_interrupted_and_the_deadline_named(work):
    """A regular expression holds the interpreter's lock as well."""
    began = time.monotonic()
    words = "a call that blocks did not end within 0.3 s; if it only needs longer, raise controller.episode_timeout_s"
    with pytest.raises(DeadlinePassed, match=words), alarm():
        asyncio.run(beside(work))
    assert time.monotonic() - began < 5 and CALLS == [1]


def test_a_loop_that_comes_by_goes_on_for_longer(monkeypatch):
    monkeypatch.setattr(deadlines, "BEAT_S", 0.02)

    async def run():
        async with interruptible():
            for _ in range(30):
                time.sleep(0.04)
                await asyncio.sleep(0.02)

    with alarm(seconds=1.0):
        asyncio.run(run())
    assert not CALLS


def test_one_that_swallows_the_interrupt_is_interrupted_again():
    def deaf():
        with suppress(BaseException):
            time.sleep(30)
        time.sleep(30)

    with pytest.raises(DeadlinePassed), alarm():
        asyncio.run(beside(deaf))
    assert len(CALLS) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_other_errors_stay_what_they_are(error):
    def fails():
        raise error("own")

    with pytest.raises(error, match="own"), alarm():
        asyncio.run(beside(fails))


def test_ctrl_c_while_a_blocked_run_ends_counts():
    with pytest.raises(KeyboardInterrupt) as caught, alarm():
        try:
            asyncio.run(beside(lambda: time.sleep(30)))
        finally:
            raise KeyboardInterrupt
    assert type(caught.value) is KeyboardInterrupt and CALLS == [1]


def test_an_error_of_the_stacks_keeps_nobody_from_being_interrupted():
    with pytest.raises(DeadlinePassed), LoopAlarm(0.2, "a call", "key", lambda: 1 / 0):
        asyncio.run(beside(lambda: time.sleep(30)))


def test_an_alarm_of_others_rings_where_it_is_earlier_and_goes_on_where_it_is_later():
    rings, before = [], signal.signal(signal.SIGALRM, lambda *_: rings.append(time.monotonic()))
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with alarm(seconds=5.0):
            asyncio.run(beside(lambda: time.sleep(0.3)))
        assert len(rings) == 1 and not CALLS
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        with alarm(seconds=1.0):
            asyncio.run(beside(lambda: None))
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 2.0 - (time.monotonic() - began - 0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_without_an_alarm_and_in_another_thread_nothing_is_set():
    asyncio.run(beside(lambda: None))
    with alarm(), ThreadPoolExecutor(1) as thread:
        context = contextvars.copy_context()
        thread.submit(context.run, asyncio.run, beside(lambda: time.sleep(0.5))).result()
    assert not CALLS


def test_a_run_through_ray_leaves_stacks_and_one_process_has_no_alarm(tmp_path, monkeypatch):
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setattr(main, "LEAST_S", 0.2)
    resources, controller = SimpleNamespace(one_process=False), SimpleNamespace(episode_timeout_s=0.1)
    trainer = SimpleNamespace(default_local_dir=str(tmp_path))
    config = SimpleNamespace(resources=resources, controller=controller, trainer=trainer)
    words = "waits without await.*controller.num_workers=1.*0.2 s"
    with pytest.raises(DeadlinePassed, match=words), main.blocked_alarm(config):
        asyncio.run(beside(lambda: time.sleep(30)))
    (stacks,) = (tmp_path / "stacks").rglob("driver_*.txt")
    assert "test_loop_alarm.py" in stacks.read_text(), "where it waited"
    resources.one_process = True
    with main.blocked_alarm(config):
        asyncio.run(beside(lambda: time.sleep(0.5)))


def test_an_episode_that_blocks_is_interrupted():
    class Blocks(Runner):
        async def run(self, episode):
            time.sleep(30)

    team = controller(runner="single_turn")
    team.runner = Blocks(Runner.Config("blocks"))
    with pytest.raises(DeadlinePassed), alarm():
        collected(team, tasks=2)
    assert CALLS == [1]
