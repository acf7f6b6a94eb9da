"""A turn's deadlines cost no task and no timer of its own: counted, not timed."""

import asyncio

import pytest

from marl.utils.deadlines import HangsError, OutOfTime, Watch, own_time, waiting_for_others

CALLERS = 50


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts timers and tasks."""

    def __init__(self):
        super().__init__()
        self.timers = self.tasks = 0

    def call_at(self, *arguments, **options):
        self.timers += 1
        return super().call_at(*arguments, **options)

    def create_task(self, *arguments, **options):
        self.tasks += 1
        return super().create_task(*arguments, **options)


def counted(coroutine):
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(coroutine)
        return runner.get_loop().tasks, runner.get_loop().timers


async def ticks(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


async def everybody(asks):
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(asks())


def test_answers_are_watched_by_one_timer_and_without_tasks():
    watch = Watch(60.0)

    async def asks():
        for _ in range(4):
            await watch.answer(ticks())

    tasks, timers = counted(everybody(asks))
    assert tasks <= CALLERS + 2, "the callers, and what runs them"
    assert timers <= 4, "one while anybody asks"


def test_an_episode_that_waits_often_sets_one_timer():
    async def asks():
        async with own_time(60.0):
            for _ in range(4):
                with waiting_for_others():
                    await ticks()

    assert counted(everybody(asks))[1] == CALLERS


def test_a_clock_that_rang_while_stopped_goes_on_with_what_was_left():
    async def run():
        async with own_time(0.05):
            with waiting_for_others():
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.01)
            await asyncio.sleep(30)

    loop_time = []

    async def timed():
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(OutOfTime):
            await run()
        loop_time.append(loop.time() - started)

    asyncio.run(timed())
    assert 0.15 <= loop_time[0] < 20


def test_a_caller_that_gives_up_can_ask_again():
    """Its task is not left half cancelled."""

    async def run():
        watch = Watch(0.05)
        for _ in range(2):
            with pytest.raises(HangsError):
                await watch.answer(asyncio.Event().wait())
            assert asyncio.current_task().cancelling() == 0
        assert await watch.answer(asyncio.sleep(0, "answer")) == "answer"
        assert not watch.asking and not watch.given_up

    asyncio.run(run())


def test_a_caller_that_is_cancelled_is_cancelled():
    async def run():
        watch = Watch(60.0)
        caller = asyncio.create_task(watch.answer(asyncio.Event().wait()))
        await ticks()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not watch.asking

    asyncio.run(run())


def test_an_error_is_an_answer():
    """A server that refuses a request lives: others wait on."""

    async def run():
        watch = Watch(0.2)

        async def refuse():
            raise ValueError("too long")

        async def refused():
            for _ in range(6):
                await asyncio.sleep(0.08)
                with pytest.raises(ValueError, match="too long"):
                    await watch.answer(refuse())

        async with asyncio.TaskGroup() as group:
            group.create_task(refused())
            assert await watch.answer(asyncio.sleep(0.4, "answer")) == "answer"

    asyncio.run(run())
