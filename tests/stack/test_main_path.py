"""The way from a command to an update, and from a debate to the engine, counted in frames of ours in a real run.

``docs/architecture.md`` lists the first: it is read as it is here.
"""

import asyncio
import re
import sys
from contextvars import ContextVar, copy_context
from pathlib import Path

import pytest

import marl
from marl import cli
from marl.cluster.policy_group import PolicyGroup
from marl.rollout.decoding import Engine
from tests.stack.conftest import ROOT, UNBOUND

MOST_TO_UPDATE = 15
MOST_TO_ENGINE = 15
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
OURS = str(Path(marl.__file__).parent)
LED_HERE: ContextVar[tuple[str, ...]] = ContextVar("led_here", default=())
"""Frames of ours that led to the present task or callback, within the event loop."""


def split_stack() -> tuple[list[str], list[str]]:
    """Frames of ours of the present stack, outermost first, comprehensions left out: those outside the event loop, and those
    within it."""
    frame, parts, place = sys._getframe(1), ([], []), 1
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_run_once":
            place = 0
        elif code.co_filename.startswith(OURS) and code.co_name not in COMPREHENSIONS:
            parts[place].insert(0, f"{Path(code.co_filename).relative_to(OURS)} {code.co_qualname}")
        frame = frame.f_back
    return parts if place == 0 else (parts[1], [])


def way_here() -> list[str]:
    outside, within = split_stack()
    return [*outside, *LED_HERE.get(), *within]


@pytest.fixture
def followed(monkeypatch):
    """Tasks and callbacks know which frames created them."""
    create_task, call_soon = asyncio.BaseEventLoop.create_task, asyncio.BaseEventLoop.call_soon

    def with_way(context):
        context = copy_context() if context is None else context
        context.run(LED_HERE.set, (*LED_HERE.get(), *split_stack()[1]))
        return context

    def created(self, coroutine, *, name=None, context=None):
        return create_task(self, coroutine, name=name, context=with_way(context))

    def called(self, callback, *arguments, context=None):
        own = with_way(None) if context is None else context  # of a task's step the task's
        return call_soon(self, callback, *arguments, context=own)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_task", created)
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon", called)


def noting(monkeypatch, kind, method, ways):
    plain = getattr(kind, method)

    def noted(self, *arguments, **settings):
        ways.setdefault(f"{kind.__name__}.{method}", way_here())
        return plain(self, *arguments, **settings)

    monkeypatch.setattr(kind, method, noted)


def test_from_a_command_to_an_update_and_from_a_debate_to_the_engine(monkeypatch, followed, cold_assets, tmp_path):
    ways: dict[str, list[str]] = {}
    noting(monkeypatch, PolicyGroup, "update_actor", ways)
    noting(monkeypatch, Engine, "step", ways)
    small = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=1", *UNBOUND)
    brief = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_final=false", "trainer.logger=[]")
    words = ("--config-name", "quickstart", f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}")
    assert cli.main(["train", *words, "resources.one_process=true", *small, *brief]) == 0
    update = [*ways["PolicyGroup.update_actor"], "cluster/policy_group.py PolicyGroup.update_actor"]
    play = ways["Engine.step"]
    play = [*play[play.index("runners/debate.py Debate.run") :], "rollout/decoding.py Engine.step"]
    assert len(update) <= MOST_TO_UPDATE, "\n".join(update)
    assert len(play) <= MOST_TO_ENGINE, "\n".join(play)
    listed = re.findall(r"^\d+\. `(\S+)` `(\S+)`$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert [" ".join(frame) for frame in listed] == update
