"""Commands of docs/methods.md, prepared with data as they name it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from marl.preflight.prepare import prepare
from marl.report import dump
from marl.types import Episode, Score, Task, Turn

PAGE = Path("docs/methods.md").read_text()
COMMANDS = re.findall(r"^python -m marl.main (.*)$", PAGE, re.MULTILINE)


def said(number):
    """An episode of text in which both agents give a number, and the team's answer is right."""
    asked = [{"role": "user", "content": f"you have {number % 10}"}]
    record = Episode(Task(str(number), asked, "1", "marl/smudged_note", str), 0, ["alice", "carol"])
    for agent in record.agents:
        record.turns.append(
            Turn(agent, 1, asked, "#### 1", policy=agent, stop_reason="completed", score=Score(1.0, "1"))
        )
    record.answer, record.score = "1", Score(1.0, "1")
    return record


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the commands name, in the present folder."""
    asked = [{"role": "user", "content": "you have 1"}]
    task = {"data_source": "marl/smudged_note", "prompt": asked, "reward_model": {"ground_truth": "1"}}
    tables = {
        "rows": {"prompt": "you have 1", "answer": "#### 1"},
        "tasks": task | {"extra_info": {"answer": "#### 1"}},
    }
    for name, row in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(32)))
    written = dump.write([said(number) for number in range(32)], 40, tmp_path / "run" / "rollouts")
    (tmp_path / "best.jsonl").write_bytes(written.read_bytes())
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_prepared(command, files, compose_config, cold_assets):
    words = shlex.split(command)
    name = words[words.index("--config-name") + 1]
    overrides = [word for word in words if not word.startswith("--") and word != name]
    setup = prepare(compose_config(f"assets={cold_assets}", *overrides, name=name))
    assert f"method={setup.method.config.name}" in words
    solo = "+agents.solo={}" in words
    assert list(setup.config.agents) == (["solo"] if solo else ["alice", "carol"])
