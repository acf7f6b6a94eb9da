"""A run's folder of somebody else, with links and pipes in it: nothing is written elsewhere, and nobody waits."""

import json
import os
import shutil
import signal

import pytest

from marl.commands import report
from marl.config.errors import ConfigError
from marl.evaluation.export import checkpoint_of
from marl.evaluation.recorded_run import RecordedRun
from marl.evaluation.source import find
from marl.preflight.run_folder import locked
from marl.preflight.unfinished import identity_in
from marl.report.runs import is_running, load_all
from marl.utils import folders, manifest
from marl.utils.plain_files import NotPlain

CONFIG = {"trainer": {}, "runner": {"name": "debate"}, "agents": {}}


@pytest.fixture(autouse=True)
def in_time():
    """An error in place of a wait for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint, an evaluation, and a folder of a tracker, which keeps links."""
    run = tmp_path / "run"
    for name in ("global_step_2/alice/actor", "evaluations/mine/episodes", "ledger/step_3", "validation", "wandb"):
        (run / name).mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"config": CONFIG, "agents_in_order": []}))
    folders.write_state(run / "global_step_2", {"step": 2, "policies": []})
    manifest.seal(run / "global_step_2", {"step": 2})
    (run / "wandb" / "latest-run").symlink_to(tmp_path)
    return run


def lock(run):
    with locked(run):
        pass


OPENED = {
    "train": lock,
    "eval": lambda run: find(str(run)),
    "eval a checkpoint": lambda run: find(str(run / "global_step_2")),
    "export": lambda run: checkpoint_of(run, None),
    "replay": RecordedRun.at,
    "compare": lambda run: load_all([str(run)]),
    "report": lambda run: report.command.callback(str(run)),
}
PLACES = (
    ".lock", ".run.json.tmp", "run.json", "metrics.jsonl", "summary.json", "report.md", "report.png", "evaluations", "ledger",
    "validation", "evaluations/mine", "evaluations/mine/result.json", "evaluations/mine/episodes", "ledger/step_3/host_1.jsonl",
    "validation/3.jsonl", "global_step_2", "global_step_2/manifest.json", "global_step_2/alice/actor/added_tokens.json",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("place", PLACES)
def test_a_link_or_a_pipe_in_a_runs_folder_is_refused_by_its_name(run, tmp_path, kind, place):
    victim, path = tmp_path / "victim", run / place
    if path.is_dir():
        shutil.copytree(path, victim)
        shutil.rmtree(path)
    else:
        victim.write_bytes(path.read_bytes() if path.is_file() else b"dear")
        path.unlink(missing_ok=True)
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    before = sorted((str(path), path.is_file() and path.read_bytes()) for path in [victim, *victim.rglob("*")])
    for open_it in OPENED.values():
        with pytest.raises(ConfigError):
            open_it(run)
    assert sorted((str(path), path.is_file() and path.read_bytes()) for path in [victim, *victim.rglob("*")]) == before


def test_a_folder_of_files_is_opened(run):
    lock(run)
    assert find(str(run)).step == find(str(run / "global_step_2")).step == 2
    assert checkpoint_of(run, None).name == "global_step_2" and load_all([str(run)])


def test_files_that_are_looked_at_in_passing_are_not_waited_for(run, tmp_path):
    """Those of runs beside a new one, and of a checkpoint that is named alone."""
    os.mkfifo(run / ".lock")
    assert is_running(run), "for all that is known"
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    assert identity_in(run) is None
    os.mkfifo(run / "global_step_2" / "pipe")
    with pytest.raises(manifest.Damaged, match="pipe is a link, or no file"):
        folders.checked(run / "global_step_2", family=None)
    (tmp_path / "victim").write_text("dear")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(NotPlain, match="is a link"):
        manifest.replace_text(tmp_path / "file", "changed")
    assert (tmp_path / "victim").read_text() == "dear"
