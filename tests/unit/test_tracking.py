"""A run's trackers write into its own folder, whatever the process did before; metrics.jsonl is appended to."""

import asyncio
import json
import os
import sqlite3
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import marl.build
from marl import main
from marl.config.errors import ConfigError
from marl.config.identity import settings_of
from marl.config.rules.training import trackers_are_installed
from marl.report.transcripts import Transcripts, samples_of
from marl.types import Episode, Score, Task, Turn
from marl.utils import process_time
from marl.utils.tracking import METRICS, tracking_of


def config_of(folder, *loggers, val_only=False):
    run = {"project_name": "p", "experiment_name": "e", "default_local_dir": str(folder), "val_only": val_only}
    return OmegaConf.create(run | {"logger": list(loggers)})


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Environment as an earlier run in this process, or the user's shell, may have left it."""
    folder = tmp_path / "foreign"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "of_another.jsonl"))
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(folder))
    return folder


def test_two_runs_of_one_process_write_into_their_own_folders(tmp_path, foreign):
    first, second = (tracking_of(config_of(tmp_path / name, "file"), {}) for name in ("a", "b"))
    first.log({"x": 1.0}, 0)
    second.log({"x": 2.0}, 0)
    first.log({"x": 3.0}, 1)
    assert lines(tmp_path / "a") == [{"step": 0, "data": {"x": 1.0}}, {"step": 1, "data": {"x": 3.0}}]
    assert lines(tmp_path / "b") == [{"step": 0, "data": {"x": 2.0}}]
    assert not foreign.exists()


def test_the_environment_is_left_as_it_was(tmp_path, monkeypatch):
    for key in ("TENSORBOARD_DIR", "WANDB_DIR", "WANDB_MODE"):
        monkeypatch.delenv(key, raising=False)
    before = dict(os.environ)
    for name in ("a", "b"):
        tracking_of(config_of(tmp_path / name, "file", "tensorboard"), {}).log({"x": 1.0}, 0)
        assert list((tmp_path / name / "tensorboard").iterdir()), "its own events"
    assert dict(os.environ) == before


def test_the_users_folder_of_a_tracker_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    tracking_of(config_of(tmp_path / "run", "tensorboard"), {}).log({"x": 1.0}, 0)
    assert list((tmp_path / "events").iterdir()) and not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize("step,kept", [(2, [0, 1, 2, 2]), (3, [0, 1, 2, 2, 3]), (9, [0, 1, 2, 2, 3]), (0, [])])
def test_a_resumed_run_appends_to_the_steps_before_it(tmp_path, step, kept):
    """Later steps are done again; the last line was cut short by the end of the machine."""
    whole = "".join(json.dumps({"step": step, "data": {}}) + "\n" for step in (0, 1, 2, 2, 3))
    (tmp_path / METRICS).write_text(whole + '{"step": 1, "da')
    tracking_of(config_of(tmp_path, "file"), {}, step).log({"x": 1.0}, step + 1)
    assert [line["step"] for line in lines(tmp_path)] == [*kept, step + 1]


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_only_validates_keeps_the_lines_of_all_steps(tmp_path, step):
    """It does none of the later steps again; the last line was cut short by the end of the machine."""
    whole = "".join(json.dumps({"step": step, "data": {}}) + "\n" for step in (0, 1, 2, 3))
    (tmp_path / METRICS).write_text(whole + '{"step": 1, "da')
    tracking_of(config_of(tmp_path, "file", val_only=True), {}, step).log({"x": 1.0}, step)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, step]


@pytest.mark.parametrize("text", [None, "", "{}\n", '{"step": 1, "data": {}}\n\x00garbage\n', "whole"])
def test_numbers_of_earlier_steps_that_are_gone_are_named(tmp_path, caplog, text):
    whole = "".join(json.dumps({"step": step, "data": {}}) + "\n" for step in (0, 1, 2))
    if text is not None:
        (tmp_path / METRICS).write_text(whole if text == "whole" else text)
    tracking_of(config_of(tmp_path, "file"), {}, 2)
    assert not caplog.records, "a run that goes on from another folder"
    if text is not None:
        (tmp_path / METRICS).write_text(whole if text == "whole" else text)
    (tmp_path / "global_step_2").mkdir()
    tracking_of(config_of(tmp_path, "file"), {}, 2)
    state = "is missing" if text is None else "is damaged"
    expected = [] if text == "whole" else [f"{tmp_path / METRICS} {state}: the numbers of "]
    assert [record.message[: len(expected[0])] for record in caplog.records] == expected


def test_without_the_tracker_there_is_no_file(tmp_path):
    tracking_of(config_of(tmp_path, "console"), {}).log({"x": 1.0}, 0)
    assert not (tmp_path / METRICS).exists()


def test_trackers_are_shown_no_secrets(tmp_path, monkeypatch):
    """The settings that a run hands to its trackers."""
    shown = []
    monkeypatch.setattr("marl.utils.tracking.Tracking", lambda **known: shown.append(known["config"]))
    settings = settings_of(OmegaConf.create({"judge": {"api_key": "abc", "url": "x"}}))
    tracking_of(config_of(tmp_path), settings)
    assert shown == [{"judge": {"api_key": "***", "url": "x"}}]


def test_every_further_run_of_a_process_counts_its_own_seconds(monkeypatch):
    """As those of a sweep; the first one counts from the start of the process."""
    monkeypatch.setattr(process_time, "STARTED", [time.monotonic() - 50.0])
    monkeypatch.setattr(process_time, "BEGUN", [])
    process_time.begin_run()
    assert 50.0 <= process_time.process_seconds() < 60.0
    process_time.begin_run()
    assert process_time.process_seconds() < 10.0


class Refusing:
    """A tracker that takes nothing once it has been finished, as W&B's."""

    def __init__(self):
        self.logged, self.code = [], None

    def log(self, data, step):
        assert self.code is None, "logged after it was finished"
        self.logged.append((data, step))

    def finish(self, exit_code):
        self.code = exit_code


@pytest.mark.parametrize("fails", [False, True])
def test_the_baselines_reach_the_trackers_before_these_are_finished(tmp_path, monkeypatch, fails):
    tracking = tracking_of(config_of(tmp_path, "file"), {})
    tracker = tracking.logger["wandb"] = Refusing()
    told = []

    async def fit():
        if fails:
            raise RuntimeError("out of luck")

    async def build(*_):
        return SimpleNamespace(
            tracking=tracking, fit=fit, history={0: {"vote": 0.25}}, step_number=3, summarise=told.append
        )

    monkeypatch.setattr(marl.build, "build", build)
    monkeypatch.setattr(main, "frozen_gc", nullcontext)
    run = OmegaConf.create({"baseline": ["untrained"], "trainer": config_of(tmp_path, "file")})
    attempt = main._train(SimpleNamespace(config=run), None, False)
    if fails:
        with pytest.raises(RuntimeError):
            asyncio.run(attempt)
        assert (tracker.code, told) == (1, [])
        return
    asyncio.run(attempt)
    ((data, step),) = tracker.logged
    assert (data["baseline/untrained/accuracy"], step, tracker.code) == (0.25, 3, 0)
    assert lines(tmp_path)[-1] == {"step": 3, "data": data} and told[0]["untrained"]["vote"] == 0.25


def episode_of(number, texts=("3", "it is 4|\napi_key=sk-abcdefghijklmnopqrstuvwx"), failure=None):
    question = [{"role": "user", "content": f"2 + 2, number {number}"}]
    record = Episode(Task(f"val/{number}", question, "4", "x", str), 0, ["alice", "carol"], failure=failure)
    for place, text in enumerate(texts):
        turn = Turn(record.agents[place], place + 1, question, text, score=Score(float(place), text[-1:]))
        record.turns.append(turn)
    record.answer, record.score = "4", Score(1.0, "4")
    return record


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Shows three of four episodes in a real tracker, ends it as a run does, and returns the folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("TENSORBOARD_DIR", "WANDB_DIR", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def show(name, folder="run", number=3):
        settings = OmegaConf.merge(config_of(tmp_path / folder, name), {"log_val_generations": number})
        tracking = tracking_of(settings, {"trainer": {}})
        played = [*map(episode_of, range(3)), episode_of(3, texts=(), failure="error")]
        Transcripts(settings).show(tracking, played, 3)
        tracking.log({"val/team/vote": 0.5}, 3)
        tracking.finish()
        return tmp_path / folder

    return show


def test_tensorboard_shows_transcripts_in_the_runs_folder_without_secrets(shown, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(shown("tensorboard") / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors("val/generations/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3 and "user: 2 + 2, number" in text and "**carol, round 2** (score 1)" in text
    assert "Answer: 4; truth: 4" in text and "sk-abc" not in text
    assert not (tmp_path / "tensorboard_log").exists()


def test_a_run_that_asks_for_no_transcripts_shows_none(shown):
    folder = shown("tensorboard", number=0) / "tensorboard"
    assert b"generations" not in b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.mark.slow
def test_every_run_of_a_process_has_its_own_folder_of_wandb(shown):
    """Wandb keeps the folder of the first."""
    pytest.importorskip("wandb")
    shown("wandb", "earlier")
    media = shown("wandb") / "wandb" / "latest-run" / "files" / "media" / "table"
    (table,) = media.rglob("*.table.json")
    assert "**alice, round 1** (score 0)" in table.read_text()


@pytest.mark.slow
def test_mlflow_keeps_numbers_and_transcripts_in_the_runs_folder(shown):
    pytest.importorskip("mlflow")
    folder = shown("mlflow")
    (file,) = (folder / "mlflow").glob("*/artifacts/val_step3.json")
    assert len(json.loads(file.read_text())) == 3
    with sqlite3.connect(folder / "mlflow.db") as store:
        assert store.execute("select key, value, step from metrics").fetchall() == [("val/team/vote", 0.5, 3)]
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
    assert not os.path.exists("mlruns"), "the working folder stays clean"


def test_the_same_tasks_are_drawn_whenever_they_are_played():
    """Their order is by chance, and differs between validations."""
    played = [episode_of(number) for number in range(20)]
    first, again = samples_of(played, 4), samples_of(played[::-1], 4)
    assert first == again and len({prompt for prompt, *_ in first}) == 4
    assert [prompt[-1] for prompt, *_ in first] != list("0123"), "not the first ones"


def test_a_folder_with_a_trackers_name_is_no_package(tmp_path, monkeypatch):
    """Python finds it as a namespace package, where the working folder is on its path."""
    (tmp_path / "clearml").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="clearml is not installed"):
        trackers_are_installed(OmegaConf.create({"trainer": {"logger": ["file", "clearml"]}}))
    trackers_are_installed(OmegaConf.create({"trainer": {"logger": ["file", "tensorboard"]}}))
