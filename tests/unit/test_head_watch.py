"""A head that no longer answers is named before Ray ends the run. tests/multinode has a head to lose."""

import asyncio
import logging
import subprocess
import time
from types import SimpleNamespace

import pytest
import ray

from marl.cluster import head_watch
from marl.cluster.failures import GroupLost


async def head(port=0, hangs=False):
    """A server that stands for the head."""

    async def speak(reader, writer):
        if hangs:
            await asyncio.sleep(60)
        writer.write(b"settings")
        writer.close()

    return await asyncio.start_server(speak, "127.0.0.1", port)


@pytest.fixture
def said(monkeypatch, caplog):
    """Log lines while some work runs under the watch of a head that may be silent for .2 s."""
    monkeypatch.setattr(head_watch, "BEAT_S", 0.02)
    monkeypatch.setenv(head_watch.VARIABLE, "0.4")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    async def watched(work):
        server = await head()
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=f"127.0.0.1:{port}"))
        async with server:
            await head_watch.head_watched()(work)(server, port)
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1, "nobody watches any longer"

    def said(work):
        with caplog.at_level(logging.INFO, "marl.cluster.head_watch"):
            asyncio.run(watched(work))
        return [record.getMessage() for record in caplog.records if record.name == "marl.cluster.head_watch"]

    return said


def test_nothing_is_said_of_a_head_that_answers(said):
    assert said(lambda server, port: asyncio.sleep(0.4)) == []


@pytest.fixture
def raylet(monkeypatch):
    """A process that stands for the raylet."""
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(head_watch, "own_raylet", lambda: process)
    yield process
    process.kill()
    process.wait()


def test_a_dead_raylet_is_a_fault(said, raylet):
    async def work(server, port):
        raylet.kill()
        await asyncio.sleep(5)

    with pytest.raises(GroupLost, match=f"raylet, pid {raylet.pid}"):
        said(work)


@pytest.mark.parametrize("dies", [False, True])
def test_an_interrupt_is_no_fault(said, raylet, dies):
    """Neither where the same signal has ended the raylet."""

    async def work(server, port):
        task = asyncio.current_task()
        if dies:
            raylet.kill()
            raylet.wait()
        asyncio.get_running_loop().call_later(0.001, task.cancel)
        time.sleep(0.1)  # both are due
        await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        said(work)


def test_nothing_is_said_after_a_blocked_loop(said):
    async def work(server, port):
        await asyncio.sleep(0.05)
        time.sleep(0.5)
        await asyncio.sleep(0.1)

    assert said(work) == []


def test_a_head_that_is_silent_for_half_of_rays_limit_is_named_once_and_so_is_its_return(said):
    async def work(server, port):
        server.close()
        await asyncio.sleep(0.4)
        async with await head(port):
            await asyncio.sleep(0.1)

    lost, back = said(work)
    assert (
        "127.0.0.1:" in lost and "has not answered for 0.2 s; of one that is gone, Ray ends the run after 0.4 s" in lost
    )
    assert "ray start --head" in lost and "trainer.resume_mode=auto" in lost
    assert back.endswith("answers again")


def test_a_short_silence_is_not_worth_a_word(said):
    async def work(server, port):
        server.close()
        await asyncio.sleep(0.1)
        async with await head(port):
            await asyncio.sleep(0.3)

    assert said(work) == []


def test_a_head_that_accepts_and_says_nothing_is_silent_unless_it_waits_for_tls(monkeypatch):
    monkeypatch.setattr(head_watch, "BEAT_S", 0.1)

    async def asked(hangs):
        async with await head(hangs=hangs) as server:
            return await head_watch.answers(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    assert (asyncio.run(asked(False)), asyncio.run(asked(True))) == (True, False)
    monkeypatch.setenv(head_watch.TLS, "1")
    assert asyncio.run(asked(True))
