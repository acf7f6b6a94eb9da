"""Rollout dumps are written beside the next step: whole, in order, and no error is lost."""

import asyncio
import json
import logging
import threading

import pytest

from marl.report import dump_writer
from marl.report.dump_writer import DumpWriter
from tests.builders import batch_of, build_learner as build, episode


def trained():
    """Episodes, their batch and the credit of their turns."""
    records = [episode("t", 0, [[1.0, 0.5], [0.25, None]]), episode("t", 1, [[0.0, 0.0], [0.0, None]])]
    batch, learner = batch_of(*records), build("grpo", std=False)
    learner.assign_credit(batch)
    return records, batch, learner.credit.of


async def start(writer, step):
    episodes, batch, credit = trained()
    await writer.write(episodes, step, batch, credit)


@pytest.fixture
def slow(monkeypatch):
    """Holds every dump back until it is set."""
    gate, write = threading.Event(), dump_writer.dump.write

    def held(*arguments):
        assert gate.wait(20)
        return write(*arguments)

    monkeypatch.setattr(dump_writer.dump, "write", held)
    return gate


def test_a_step_goes_on_while_its_dump_is_written(slow, tmp_path):
    async def run():
        writer = DumpWriter(str(tmp_path))
        await asyncio.wait_for(start(writer, 1), 10)
        assert not list(tmp_path.iterdir())
        second = asyncio.create_task(start(writer, 2))
        await asyncio.sleep(0.05)
        assert not second.done(), "two steps' episodes would be held"
        slow.set()
        await second
        await writer.flush()

    asyncio.run(run())
    for step in (1, 2):
        lines = [json.loads(line) for line in (tmp_path / f"{step}.jsonl").read_text().splitlines()]
        assert [line["advantage"] for line in lines] == [0.75, 0.25, 0.125, -0.75, -0.25, -0.125]
        assert {line["step"] for line in lines} == {step}


@pytest.mark.parametrize("then", ["write", "flush", "leave"])
def test_the_error_of_a_dump_is_raised_by_the_next_call(tmp_path, then):
    (tmp_path / "file").write_text("")

    async def run():
        async with DumpWriter(str(tmp_path / "file" / "folder")) as writer:
            await start(writer, 1)
            if then == "write":
                await start(writer, 2)
            elif then == "flush":
                await writer.flush()

    with pytest.raises(NotADirectoryError):
        asyncio.run(run())


def test_a_run_that_fails_leaves_its_last_dump(slow, tmp_path):
    async def run():
        async with DumpWriter(str(tmp_path)) as writer:
            await start(writer, 1)
            asyncio.get_running_loop().call_later(0.05, slow.set)
            raise RuntimeError("the policy died")

    with pytest.raises(RuntimeError, match="the policy died"):
        asyncio.run(run())
    assert len((tmp_path / "1.jsonl").read_text().splitlines()) == 6


def test_of_two_errors_the_run_s_own_is_raised_and_the_dump_s_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")

    async def run():
        async with DumpWriter(str(tmp_path / "file" / "folder")) as writer:
            await start(writer, 1)
            raise RuntimeError("the policy died")

    with pytest.raises(RuntimeError, match="the policy died"), caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "a rollout dump was not written: NotADirectoryError" in caplog.text


def test_a_dump_outlives_the_interruption_of_the_step_that_waits_for_it(slow, tmp_path, monkeypatch, caplog):
    """Its error is logged, though the run ends by another one."""
    write = dump_writer.dump.write

    def fails(*arguments):
        write(*arguments)
        raise OSError("no space left")

    monkeypatch.setattr(dump_writer.dump, "write", fails)

    async def run():
        async with DumpWriter(str(tmp_path)) as writer:
            await start(writer, 1)
            second = asyncio.create_task(start(writer, 2))
            await asyncio.sleep(0.05)
            second.cancel()
            slow.set()
            await second

    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert (tmp_path / "1.jsonl").read_text() and "no space left" in caplog.text


def test_without_a_folder_nothing_is_written_or_computed():
    asyncio.run(DumpWriter(None).write([], 1, None, None))
