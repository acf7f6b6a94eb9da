"""``marl init``: a project that passes its tests and runs as it is."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from marl import cli
from marl.report.runs import load_all
from tests.stack.conftest import ROOT


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("name", ["my-team", "class", "Team", "torch", "json", "name", "there"])
def test_a_name_that_no_new_package_can_have_is_refused(here, capsys, name):
    (here / "there").mkdir()
    assert cli.main(["init", name]) == 2
    assert f"{name}: " in capsys.readouterr().err and list(here.iterdir()) == [here / "there"]


def test_every_file_is_the_projects(here):
    assert cli.main(["init", "my_team"]) == 0
    files = [path for path in (here / "my_team").rglob("*") if path.is_file()]
    assert len(files) == 12 and all("NAME" not in path.read_text() for path in files)
    assert (
        os.access(here / "my_team" / "train.sh", os.X_OK)
        and len((here / "my_team" / "questions.csv").open().readlines()) == 201
    )


def test_a_toy_model_that_was_cut_short_is_made_again(here, monkeypatch):
    assert cli.main(["init", "my_team"]) == 0
    monkeypatch.chdir(here / "my_team")

    def ensure(folder, *_, **__):
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / "model" / "config.json").write_text("{}")

    def cut(source, target):
        Path(target).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("marl.quickstart.assets.ensure", ensure)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("shutil.copytree", cut)
        runpy.run_path("toy.py", run_name="__main__")
    assert not Path("outputs/model").exists()
    runpy.run_path("toy.py", run_name="__main__")
    assert Path("outputs/model/config.json").is_file()


@pytest.mark.slow
def test_a_project_passes_its_tests_and_trains_as_it_is(here):
    assert cli.main(["init", "my_team"]) == 0
    project = here / "my_team"
    paths = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "MARL_CACHE"} | paths

    def run(*words):
        done = subprocess.run(
            words, cwd=project, env=environment, input="how many ?\n", capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "WARNING" not in done.stderr, done.stderr[-2000:]
        return done.stdout

    assert "6 passed" in run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    printed = run("./train.sh", "resources.one_process=true", "trainer.total_training_steps=3")
    rows = re.search(r"(\d+) rows to train and (\d+) to validate, of questions.csv", printed)
    assert rows and int(rows[1]) + int(rows[2]) == 200
    assert printed.count("step ") >= 3
    (found,) = load_all([str(project / "outputs")])
    assert found.state == "finished" and found.config["learner"] == {
        "name": "my_team_learner",
        "train_rounds": None,
        "scale": 1.0,
    }
    assert found.config["runner"]["environment"] == "my_team_world" and "agent/alice/grad_norm" in found.steps[3]
    for command in re.findall(r"^marl (?:eval|chat) .*", (project / "README.md").read_text(), re.MULTILINE):
        words = (sys.executable, "-m", *shlex.split(command))
        environment["VERL_USE_EXTERNAL_MODULES"] = "my_team"
        assert ("team ⟶ " if "chat" in words else "| team | accuracy |") in run(*words), command
        del environment["VERL_USE_EXTERNAL_MODULES"]
        with pytest.raises(AssertionError, match="only if you name them: .*VERL_USE_EXTERNAL_MODULES=my_team marl"):
            run(*words)
    assert (
        "./train.sh" not in (found.folder / "README.md").read_text()
        and "VERL_USE_EXTERNAL_MODULES=my_team python -m marl train --config-dir . --config-name experiment"
        in (found.folder / "README.md").read_text()
    )
