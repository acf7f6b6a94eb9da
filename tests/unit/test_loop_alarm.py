"""Code that blocks the event loop is interrupted: no other deadline can pass there."""

import asyncio
import contextvars
import re
import signal
import sys
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

    with interruptible():
        return await asyncio.gather(task(), asyncio.sleep(0.01))


def catastrophic():
    re.fullmatch(r"(a+)+b", "a" * 40)


@pytest.fixture(autouse=True)
def no_timer_of_pytests():
    """Its deadline of a test is an alarm too, and comes back."""
    handler, left = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)[0]
    yield
    found = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left)
    assert found == (handler, (0.0, 0.0))


@pytest.mark.parametrize("work", [lambda: time.sleep(30), catastrophic], ids=["sleep", "regex"])
def test_a_loop_that_is_blocked_is_interrupted_and_the_deadline_named(work):
    """A regular expression holds the interpreter's lock as well."""
    began = time.monotonic()
    words = "a call that blocks did not end within 0.3 s; if it only needs longer, raise controller.episode_timeout_s"
    with pytest.raises(DeadlinePassed, match=words), alarm():
        asyncio.run(beside(work))
    assert time.monotonic() - began < 10 and CALLS


def test_a_loop_that_comes_by_goes_on_for_longer(monkeypatch):
    monkeypatch.setattr(deadlines, "BEAT_S", 0.02)

    async def run():
        with interruptible():
            for _ in range(25):
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
    assert len(CALLS) >= 2


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
    assert type(caught.value) is KeyboardInterrupt and CALLS


def test_a_wait_of_rays_that_makes_it_a_plain_one_is_no_persons_interrupt():
    def as_ray_waits():
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            raise KeyboardInterrupt

    with pytest.raises(DeadlinePassed), alarm():
        asyncio.run(beside(as_ray_waits))


def test_blocks_within_one_another_share_the_alarm():
    async def nested():
        with interruptible():
            with interruptible():
                await asyncio.sleep(0)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
            time.sleep(30)

    with pytest.raises(DeadlinePassed), alarm():
        asyncio.run(nested())


def test_what_blocks_while_a_blocked_run_ends_is_interrupted_too(monkeypatch):
    monkeypatch.setattr(deadlines, "ENDING_S", 0.3)
    ends = [30.0]

    async def deaf():
        try:
            await asyncio.sleep(60)
        finally:  # of one whose loop is gone, when it is collected
            time.sleep(ends[0])

    async def run():
        others = [asyncio.create_task(deaf()) for _ in range(2)]
        await asyncio.sleep(0)
        await beside(lambda: time.sleep(30))
        return others

    began = time.monotonic()
    with pytest.raises(DeadlinePassed), alarm():
        asyncio.run(run())
    assert time.monotonic() - began < 20
    ends[0] = 0.0


def test_an_error_of_the_stacks_keeps_nobody_from_being_interrupted():
    with pytest.raises(DeadlinePassed), LoopAlarm(0.2, "a call", "key", lambda: 1 / 0):
        asyncio.run(beside(lambda: time.sleep(30)))


@pytest.fixture
def rings():
    """Times at which an alarm of others rang."""
    found, before = [], signal.signal(signal.SIGALRM, lambda *_: found.append(time.monotonic()))
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_alarm_of_others_that_is_earlier_rings_as_it_would(rings):
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with alarm(seconds=5.0):
        asyncio.run(beside(lambda: time.sleep(0.3)))
    assert len(rings) == 1 and not CALLS


def test_an_alarm_of_others_that_is_later_goes_on_by_what_is_left(rings):
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    with alarm(seconds=5.0):
        asyncio.run(beside(lambda: time.sleep(0.3)))
    assert 30 < signal.getitimer(signal.ITIMER_REAL)[0] <= 59.7 and not rings


def test_an_alarm_of_others_that_comes_due_is_no_longer_stood_in_for(rings, monkeypatch):
    """An awaiting hang is theirs to end."""
    monkeypatch.setattr(deadlines, "BEAT_S", 0.05)
    signal.setitimer(signal.ITIMER_REAL, 0.8)

    async def waits():
        with interruptible():
            while not rings:
                await asyncio.sleep(0.05)

    with alarm(seconds=0.5):
        asyncio.run(asyncio.wait_for(waits(), 20))
    assert len(rings) == 1 and not CALLS


def test_without_an_alarm_and_in_another_thread_nothing_is_set():
    asyncio.run(beside(lambda: None))
    with alarm(), ThreadPoolExecutor(1) as thread:
        context = contextvars.copy_context()
        thread.submit(context.run, asyncio.run, beside(lambda: time.sleep(0.5))).result()
    assert not CALLS


@pytest.mark.parametrize("alone", [False, True], ids=["ray", "one process"])
def test_a_run_that_is_blocked_leaves_stacks(tmp_path, monkeypatch, alone):
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setattr(main, "LEAST_S", 0.2)
    resources, controller = SimpleNamespace(one_process=alone), SimpleNamespace(episode_timeout_s=0.1)
    trainer = SimpleNamespace(default_local_dir=str(tmp_path))
    config = SimpleNamespace(resources=resources, controller=controller, trainer=trainer)
    words = f"waits without await.*; {'resources.one_process=false ' * alone}controller.num_workers=1.*0.2 s"
    with pytest.raises(DeadlinePassed, match=words), main.blocked_alarm(config):
        asyncio.run(beside(lambda: time.sleep(30)))
    (stacks,) = (tmp_path / "stacks").rglob("driver_*.txt")
    assert "test_loop_alarm.py" in stacks.read_text(), "where it waited"


def test_whoever_stands_at_a_breakpoint_is_not_interrupted():
    def stands():
        sys.settrace(lambda *_: None)
        time.sleep(0.5)
        sys.settrace(None)

    with alarm(seconds=0.2):
        asyncio.run(beside(stands))
    assert not CALLS


def test_an_episode_that_blocks_is_interrupted():
    class Blocks(Runner):
        async def run(self, episode):
            time.sleep(30)

    team = controller(runner="single_turn")
    team.runner = Blocks(Runner.Config("blocks"))
    with pytest.raises(DeadlinePassed), alarm():
        collected(team, tasks=2)
    assert CALLS
