"""docs/tutorial.md, typed as it stands, in an empty folder."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import tutorial
from tests.stack.conftest import ROOT

MOST_CPU_S = 15 * 60
INTERRUPTED = 130
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def script_of(commands):
    """The commands in one shell, each with its output and its exit code in files; servers that are left are ended."""
    lines = ["trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for number, shown in enumerate(commands):
        lines += ["{", shown.command, f"}} > {number}.out 2>&1 < /dev/null", f"echo $? > {number}.code"]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Outcome of all commands of the document."""
    folder, beside = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("bin")
    for name, words in (("marl", "-m marl "), ("python", "")):
        (beside / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (beside / name).chmod(0o755)
    for name, content in tutorial.files().items():
        (folder / name).write_text(content)
    commands = tutorial.commands()
    (beside / "typed.sh").write_text(script_of(commands))
    hidden = ("MARL_CACHE", "MARL_API_KEY", "RAY_ADDRESS", "VERL_USE_EXTERNAL_MODULES")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    count = [sys.executable, ROOT / "tests" / "counting_cpu.py", beside / "cpu", "bash", beside / "typed.sh"]
    subprocess.run(count, cwd=folder, env=environment, timeout=1700, check=True)
    outputs = [(folder / f"{number}.out").read_text() for number in range(len(commands))]
    codes = [int((folder / f"{number}.code").read_text()) for number in range(len(commands))]
    seconds = float((beside / "cpu").read_text())
    return SimpleNamespace(folder=folder, commands=commands, outputs=outputs, codes=codes, seconds=seconds)


def output_of(typed, word):
    return next(out for shown, out in zip(typed.commands, typed.outputs, strict=True) if word in shown.command)


def test_every_command_does_what_it_should(typed):
    expected = [INTERRUPTED if "--signal=INT" in shown.command else 0 for shown in typed.commands]
    failed = zip(typed.commands, typed.outputs, typed.codes, expected, strict=True)
    assert [(shown.command, code, out[-2000:]) for shown, out, code, right in failed if code != right] == []


def test_fifteen_minutes_of_a_processor_are_enough(typed):
    assert 60 < typed.seconds <= MOST_CPU_S, "of all processes, Ray's included"


def test_what_is_quoted_is_what_is_printed(typed):
    quoted = [shown for shown in typed.commands if shown.lines]
    assert len(quoted) >= 9
    outputs = zip(typed.commands, typed.outputs, strict=True)
    missing = {shown.command: lines for shown, out in outputs if (lines := tutorial.missing_lines(shown, out))}
    assert missing == {}


@pytest.mark.parametrize("learner", ["grpo", "mappo"])
def test_the_team_learns(typed, learner):
    summary = json.loads((typed.folder / "outputs" / learner / "latest" / "summary.json").read_text())
    before, after = (summary["accuracy"][when]["vote"] for when in ("before", "after"))
    assert after > before + 0.2 and after > 0.8 and summary["steps"] == 80


def test_the_interrupted_run_is_the_one_that_goes_on(typed):
    (run,) = [path for path in (typed.folder / "outputs" / "grpo").iterdir() if not path.is_symlink()]
    assert json.loads((run / "run.json").read_text())["resumed"]


def test_the_served_team_answers(typed):
    reply = json.loads(output_of(typed, "curl"))
    (choice,) = reply["choices"]
    assert re.fullmatch(r"#### \d+", choice["message"]["content"]) and len(choice["transcript"]) == 4
    assert {turn["agent"] for turn in choice["transcript"]} == {"alice", "carol"}
    assert "team ⟶ #### " in output_of(typed, "marl chat")


def test_the_exported_models_are_models(typed):
    from transformers import AutoModelForCausalLM

    for agent in ("alice", "carol"):
        model = AutoModelForCausalLM.from_pretrained(typed.folder / "models" / agent)
        assert sum(parameter.numel() for parameter in model.parameters()) > 50_000
