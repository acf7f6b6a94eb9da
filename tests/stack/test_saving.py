"""A run's folder over several starts: the last weights, metrics that are appended to, and other validation data."""

import json

import pytest

from marl import checkpoint
from marl.marl_trainer import MARLTrainer
from marl.utils import folders


def logged(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_kept_resumed_and_measured_on_other_data(alone, cold_assets, tmp_path, monkeypatch, caplog):
    """One after another: a run without save_freq, the same command again, one more step, and its weights on another file."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "foreign.jsonl"))
    resumed = ("trainer.resume_mode=auto", "trainer.logger=[file]")

    (tmp_path / "run.json").write_text("{}")  # as `marl.main.run` leaves it
    first = alone("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.logger=[file]")
    first.wait(first.trainer.fit())
    assert [folder.name for folder in folders.complete(tmp_path)] == ["global_step_1"]
    assert (tmp_path / "global_step_1" / "alice" / "actor" / "huggingface" / "model.safetensors").is_file()
    assert (tmp_path / "global_step_1" / "run.json").read_text() == "{}", "a checkpoint knows whose it is"
    assert logged(tmp_path) == [0, 1] and not (tmp_path / "foreign.jsonl").exists()

    again = alone(*resumed, "trainer.total_training_steps=1")
    again.wait(again.trainer.fit())
    assert "nothing to do: already at step 1 of 1" in caplog.text and logged(tmp_path) == [0, 1]

    changed = ("actor_rollout_ref.actor.optim.lr=5e-4", "actor_rollout_ref.actor.optim.weight_decay=0.5")
    further = alone(*resumed, *changed, "trainer.total_training_steps=2", "trainer.val_before_train=false")
    further.wait(further.trainer.fit())
    (group,) = further.trainer.policies["alice"].workers.worker.actor.engine.optimizer.param_groups
    assert group["lr"] == pytest.approx(5e-4 * 2 / 5) and group["weight_decay"] == 0.5, (
        "as they are set now, in warm-up"
    )
    assert logged(tmp_path) == [0, 1, 2] and sorted(further.trainer.history) == [0, 1, 2]
    summary = (tmp_path / "summary.json").read_text()
    assert (tmp_path / "validation" / "2.jsonl").is_file()
    validated = (tmp_path / "validation" / "2.jsonl").read_text()

    other_file = (f"data.val_files={cold_assets}/train.parquet", "data.val_max_samples=4", "trainer.val_only=true")
    other = alone(*resumed, *other_file, "trainer.total_training_steps=2")
    other.wait(other.trainer.fit())
    assert sorted(other.trainer.history) == [2], "numbers of other problems stand apart"
    folder = tmp_path / f"validation_{other.trainer.validation_id}"
    accuracy = json.loads((folder / "summary.json").read_text())["accuracy"]
    assert accuracy["before"] == accuracy["after"] and (folder / "curves.png").is_file()
    assert (tmp_path / "summary.json").read_text() == summary, "the run's own summary stays"
    assert (tmp_path / "validation" / "2.jsonl").read_text() == validated
    assert (tmp_path / "validation" / folder.name / "2.jsonl").is_file()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{folder.name}/team/vote" in last["data"] and not any(key.startswith("val/") for key in last["data"])


@pytest.mark.slow
def test_a_last_validation_that_failed_is_done_on_resume(alone, tmp_path, monkeypatch):
    one_step = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.logger=[file]")

    async def fail(self):
        raise RuntimeError("the judge is gone")

    first = alone(*one_step)
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="the judge is gone"):
        broken.setattr(MARLTrainer, "validate", fail)
        first.wait(first.trainer.fit())
    assert [folder.name for folder in folders.complete(tmp_path)] == ["global_step_1"]
    assert logged(tmp_path) == [1] and not (tmp_path / "summary.json").exists()

    again = alone(*one_step, "trainer.resume_mode=auto")
    again.wait(again.trainer.fit())
    assert sorted(again.trainer.history) == [1] and logged(tmp_path) == [1, 1]
    trained, validated = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "timing_s/step" in trained and "val/team/vote" in validated
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_a_resumed_run_counts_the_seconds_before_it_and_its_process_once(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "process_seconds", lambda: 100.0)
    first = alone()
    first.trainer.earlier_seconds, first.trainer.step_number = 1e6, 1
    first.wait(first.trainer.save())
    again = alone("trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    again.wait(again.trainer.validate())
    monkeypatch.setattr(checkpoint, "process_seconds", lambda: 130.0)
    again.trainer.summarise()
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == pytest.approx(1e6 + 130, abs=0.1)
