"""Sample episodes reach a run's trackers as tables and transcripts: read back from what the real libraries wrote."""

import json
import os
import sqlite3

import pytest
from omegaconf import OmegaConf

from marl.report.episode_tables import EpisodeTables
from marl.report.sample_episodes import EPISODE_COLUMNS, TURN_COLUMNS, samples_of
from marl.types import Episode, Score, Task, Turn
from marl.utils.tracking import tracking_of

STEP = 3


def episode_of(number, texts=("3", "it is 4|\napi_key=sk-abcdefghijklmnopqrstuvwx"), failure=None):
    question = [{"role": "user", "content": f"2 + 2, number {number}"}]
    record = Episode(Task(f"val/{number}", question, "4", "x", str), 0, ["alice", "carol"], failure=failure)
    for place, text in enumerate(texts):
        agent = record.agents[place]
        record.turns.append(Turn(agent, place + 1, question, text, score=Score(float(place), text[-1:])))
    record.answer, record.score = "4", Score(1.0, "4")
    return record


def settings_of(folder, *loggers, number=2, freq=-1):
    run = {"project_name": "p", "experiment_name": "e", "default_local_dir": str(folder), "val_only": False}
    return OmegaConf.create(
        run | {"logger": list(loggers), "log_val_generations": number, "log_generations_freq": freq}
    )


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Shows three of four episodes in a real tracker, ends it as a run does, and returns the folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("TENSORBOARD_DIR", "WANDB_DIR", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def show(name, folder="run"):
        settings = settings_of(tmp_path / folder, name, number=3, freq=STEP)
        tracking, tables = tracking_of(settings, {"trainer": {}}), EpisodeTables(settings)
        played = [*map(episode_of, range(3)), episode_of(3, texts=(), failure="error")]
        tables.show(tracking, played, STEP)
        tables.show_training(tracking, [episode_of(8)], STEP)
        tables.show_training(tracking, [episode_of(9)], STEP + 1)
        tracking.log({"val/team/vote": 0.5}, STEP)
        tracking.finish()
        return tmp_path / folder

    return show


def rows_of(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def must_be_the_turns(rows):
    """The two turns of each of the episodes 0, 1 and 2 that were drawn, in their order, without the key in the second one."""
    drawn = {row["task"] for row in rows}
    assert len(rows) == 2 * len(drawn) >= 4
    first, second = rows[:2]
    assert list(first) == list(TURN_COLUMNS)
    assert (first["step"], first["agent"], first["round"], first["output"], first["score"]) == (
        STEP,
        "alice",
        1,
        "3",
        0.0,
    )
    assert (second["agent"], second["round"], second["answer"]) == ("carol", 2, "x")
    assert second["output"].startswith("it is 4|\n") and "sk-abc" not in second["output"]
    assert first["prompt"] == f"user: 2 + 2, number {first['task'][-1]}"


def must_be_the_episodes(rows):
    assert len(rows) == 3 and all(list(row) == list(EPISODE_COLUMNS) for row in rows)
    assert {(row["answer"], row["truth"], row["score"]) for row in rows} == {("4", "4", 1.0)}
    played = [row for row in rows if not row["failure"]]
    assert all("**alice, round 1** (score 0):\n\n> 3" in row["transcript"] for row in played)


def test_a_prediction_is_named_as_one():
    record = episode_of(0)
    record.turns[0].foresees = "carol"
    (sample,) = samples_of([record], 1)
    assert "**alice expects carol, round 1**" in sample[1] and "**carol, round 2**" in sample[1]
    assert [row[TURN_COLUMNS.index("agent")] for row in sample.turn_rows(STEP)] == ["alice expects carol", "carol"]


def test_tensorboard_shows_a_transcript_for_each_episode(shown):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = shown("tensorboard") / "tensorboard"
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if "episode" in tag]
    assert sorted(tags) == sorted(
        [f"{name}/text_summary" for name in ("val/episode_1", "val/episode_2", "val/episode_3", "train/episode_1")]
    )
    texts = {tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)] for tag in tags}
    ((step, text),) = texts["train/episode_1/text_summary"]
    assert step == STEP and "### Task val/8, sample 0" in text and "**carol, round 2** (score 1)" in text
    assert "Answer: 4; truth: 4; score 1" in text and "sk-abc" not in text


@pytest.mark.slow
def test_wandb_shows_both_tables(shown):
    """In the second run of a process, too: wandb keeps the folder of the first."""
    pytest.importorskip("wandb")
    shown("wandb", "earlier")
    media = shown("wandb") / "wandb" / "latest-run" / "files" / "media" / "table"
    tables = {
        f"{path.parent.name}/{path.name.split('_')[0]}": rows_of(json.loads(path.read_text()))
        for path in media.rglob("*.table.json")
    }
    assert set(tables) == {"val/turns", "val/episodes", "train/turns", "train/episodes"}
    must_be_the_turns(tables["val/turns"])
    must_be_the_episodes(tables["val/episodes"])
    assert [row["task"] for row in tables["train/episodes"]] == ["val/8"], "the step after is not shown"


@pytest.mark.slow
def test_mlflow_keeps_tables_and_transcripts_in_the_runs_folder(shown):
    pytest.importorskip("mlflow")
    folder = shown("mlflow")
    (files,) = (folder / "mlflow").glob("*/artifacts")
    tables = {path.parent.name: rows_of(json.loads(path.read_text())) for path in (files / "val").glob("*/*.json")}
    must_be_the_turns(tables["turns"])
    must_be_the_episodes(tables["episodes"])
    assert "### Task val/8" in (files / "train" / "transcripts" / f"step_{STEP}.md").read_text()
    with sqlite3.connect(folder / "mlflow.db") as store:
        assert store.execute("select key, value, step from metrics").fetchall() == [("val/team/vote", 0.5, STEP)]
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
    assert not os.path.exists("mlruns"), "the working folder stays clean"


@pytest.mark.slow
def test_trackio_shows_tables_and_conversations(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    shown("trackio")
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as store:
        found = [json.loads(row) for (row,) in store.execute("select metrics from metrics where step = ?", (STEP,))]
        spoken = store.execute("select messages from traces where key = 'train/generations'").fetchall()
    logged = {key: value for row in found for key, value in row.items()}
    must_be_the_turns(logged["val/turns"]["_value"])
    must_be_the_episodes(logged["val/episodes"]["_value"])
    ((messages,),) = spoken
    assert [message["role"] for message in json.loads(messages)] == ["user", "assistant", "assistant"]
    assert logged["val/team/vote"] == 0.5


def test_the_same_tasks_are_drawn_whenever_they_are_played():
    """Their order is by chance, and differs between validations."""
    played = [episode_of(number) for number in range(20)]
    first, again = samples_of(played, 4), samples_of(played[::-1], 4)
    tasks = [sample.episode.task.id for sample in first]
    assert tasks == [sample.episode.task.id for sample in again] and len(set(tasks)) == 4
    assert tasks != [f"val/{number}" for number in range(4)], "not the first ones"


def test_a_run_that_asks_for_none_shows_none(tmp_path):
    settings = settings_of(tmp_path, "tensorboard", number=0)
    tracking = tracking_of(settings, {})
    EpisodeTables(settings).show(tracking, [episode_of(0)], STEP)
    tracking.finish()
    assert b"episode" not in b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
