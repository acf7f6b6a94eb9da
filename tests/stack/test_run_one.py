"""``marl run-one``: a conversation on the screen, with a script, a model, or a record."""

import os
import subprocess
import sys

import pytest

from marl import cli
from marl.commands import run_one
from tests.stack.conftest import ROOT


@pytest.fixture
def marl(capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["marl", "run-one", *arguments])
        monkeypatch.setattr("marl.command_group.quiet_imports", lambda words: None)  # everything is imported
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_it_prints_what_each_agent_was_shown_and_said(marl):
    code, out, _ = marl(
        "runner=summary", "+agents.editor.role=Merge.", "question=2+2?", "answers=['#### 4','#### 5','so #### 4']"
    )
    assert code == 0
    assert "round 2 · editor" in out and "agent_1 answered:\n#### 5" in out and "editor ⟶ so #### 4   [1]" in out
    assert "the team's answer: 4   right: 4" in out


def test_a_game_is_played(marl):
    code, out, _ = marl("runner=game", "+runner.game={name: two_step, scale: 8}", "answers=[I say 1,1,1]")
    assert code == 0 and "agent_0 answered:\nI say 1\n\nChoose again." in out.replace("user: ", "")
    assert "agent_0 ⟶ I say 1   [0]" in out and "agent_1 ⟶ 1   [1]" in out and "the team's answer: 1 1" in out


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["runner=game", "+runner.game.round=2"], "Did you mean 'rounds'"),
        (["runner=summary", "runner.summariser=x"], "runner.summariser=x: no such agent"),
        (["runner=debate", "runner.peer_template='{agnt}'"], "'agnt'"),
        (["model=tin"], "expected one of [scripted, tiny, own]"),
        (["dump=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["episode=-1"], "episode=-1: expected a number from 0 on"),
        (["runner.num_rounds=0"], "runner.num_rounds=0"),
        (["runer=debate"], "Did you mean 'runner'"),
        (["model=tiny", "seed=abc"], "seed=abc: expected a whole number"),
        (["model=tiny", "task=smudged"], "task=smudged: expected one of smudged_note"),
        (["model=own", "answers=[4]"], "answers=['4']: model=own gives its own"),
        (["dump=x.jsonl", "question=2+2?"], "question=2+2?: dump=x.jsonl holds its own"),
        (["agents.agent_0.role=Solve it, step by step."], """role='"Solve it, step by step."'"""),
    ],
)
def test_invalid_arguments_are_errors(marl, arguments, said):
    code, _, err = marl(*arguments)
    assert code == 2 and said in err


def test_a_configuration_of_ones_own_folder_is_played(marl, tmp_path):
    (tmp_path / "experiment.yaml").write_text(
        "defaults: [marl, override agents: [schema], override runner: graph, _self_]\n"
        "runner: {start: solve, nodes: {solve: {agents: [al]}, judge: {agents: [bo], sees: [solve]}},"
        " edges: [{source: solve, to: [judge]}]}\nagents: {al: {}, bo: {}}\n"
    )
    code, out, err = marl("--config-dir", str(tmp_path), "--config-name=experiment", "answers=['#### 4']")
    assert code == 0, err
    assert "round 2 · bo" in out and "al answered:\n#### 4" in out


def test_a_real_model_plays_and_its_record_is_played_again(marl, cold_assets, tmp_path, alone):
    here = [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "--config-name", "quickstart"]
    code, out, err = marl("model=own", "row=3", *here)
    assert code == 0, err
    assert out.startswith("round 1 · alice") and out.count("carol ⟶") == 2 and "the team's answer" in out
    live = alone()
    live.wait(live.trainer.validate())
    dump = f"dump={tmp_path / 'validation' / '0.jsonl'}"
    code, out, _ = marl(dump, "episode=2", "--config-name", "quickstart")
    assert code == 0 and out.count("⟶") == 4
    code, out, _ = marl(
        dump, "episode=2", "--config-name", "quickstart", "instead=[alice/1=#### 7]", "answers=['#### 9']"
    )
    assert code == 0 and "alice ⟶ #### 7" in out and "alice said #### 7" in out and out.count("⟶ #### 9") == 2
    code, _, err = marl(dump, "episode=2", "--config-name", "quickstart", "runner.peer_template='{text}'")
    assert code == 2 and "is shown another message" in err
    code, _, err = marl(dump, "episode=99", "--config-name", "quickstart")
    assert code == 2 and "episode=99" in err
    code, _, err = marl(dump, "--config-name", "quickstart", "instead=[alice/7=x]")
    assert code == 2 and "alice/1" in err


def test_a_colon_in_a_question_is_text(marl):
    code, out, err = marl("runner=single_turn", "question=Sum up: what is 2 + 2?", "truth='a: b'", "answers=['#### 5']")
    assert code == 0, err
    assert "user: Sum up: what is 2 + 2?" in out and "right: a: b" in out


@pytest.mark.slow
def test_a_question_is_put_to_a_model(marl, cold_assets, tmp_path):
    here = [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "--config-name", "quickstart"]
    question = "Ann has 3 apples and finds 4 more . How many ?"
    code, out, err = marl("model=own", f"question={question}", *here)
    assert code == 0, err
    assert out.count(f"user: {question}") >= 2, "all agents are asked it"
    assert "right:" not in out and "[0]" not in out and "[1]" not in out, "nobody said what is right"
    code, out, err = marl("model=own", f"question={question}", "truth=7", *here)
    assert code == 0 and "right: 7" in out and ("[0]" in out or "[1]" in out), err


MINE = """
from dataclasses import dataclass
from marl.runners import Runner, register_runner

@register_runner("mine")
class Mine(Runner):
    @dataclass
    class Config(Runner.Config):
        pass

    async def run(self, episode):
        return episode.answer(await episode.agents[0].act(episode.agents[0].prompt))
"""


@pytest.mark.slow
def test_a_runner_in_the_working_folder_is_found_by_the_installed_command(tmp_path):
    """Python puts the folder of the command's script on the path, and not the working folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "bin" / "marl").write_text("import sys\nfrom marl.cli import main\nsys.exit(main())\n")
    env = os.environ | {"VERL_USE_EXTERNAL_MODULES": "mine", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "bin" / "marl"), "run-one"]
    ran = subprocess.run([*command, "runner=mine"], capture_output=True, text=True, timeout=200, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "This is what agent_0 says in round 1. #### 1" in ran.stdout and run_one.Model.tiny.value == "tiny"


@pytest.mark.parametrize("command", ["marl.cli train", "marl.main", "marl.quickstart"])
def test_a_module_that_is_not_there_is_named_before_anything_starts(command):
    env = os.environ | {"VERL_USE_EXTERNAL_MODULES": "recipe.peer_review,recipe.per_review"}
    words = [sys.executable, "-m", *command.split()]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env, cwd=ROOT)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    assert "there is no module 'recipe.per_review'" in ran.stderr and "PYTHONPATH" in ran.stderr
