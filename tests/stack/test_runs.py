"""Whole runs: what they leave, resume, a frozen agent, a learner from a recipe."""

import json

import pytest

from marl.config.errors import ConfigError
from marl.main import run
from recipe import leave_one_out  # noqa: F401 - registers a learner from outside

from .conftest import SMALL


@pytest.fixture
def start(compose_config, cold_assets, tmp_path):
    """Run in this process: what is through Ray alone, and its checkpoints, are in test_step, test_ranks, test_one_process."""

    def start(*overrides):
        steps = []
        config = compose_config(
            f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "trainer.test_freq=1", *SMALL,
            "resources.one_process=true", *overrides,
        )  # fmt: skip
        trainer = run(config, lambda step, total, metrics: steps.append(metrics))
        return trainer, steps

    return start


def test_a_run_leaves_everything_and_another_one_resumes_it(start, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "of_another_run.jsonl"))
    trainer, steps = start(
        "trainer.total_training_steps=2",
        "trainer.logger=[file,tensorboard]",
        "trainer.rollout_data_dir=${trainer.default_local_dir}/rollouts",
    )
    assert len(steps) == 2 and all(max(v for k, v in m.items() if "gap_max" in k) <= 1e-5 for m in steps)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2 and set(summary["accuracy"]["after"]) == {"round_1", "round_2", "final", "vote"}
    assert summary["log_prob_gap_max"] == trainer.log_prob_gap_max <= 1e-5
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"curves.png", "metrics.jsonl", "rollouts/1.jsonl", "validation/0.jsonl", "validation/2.jsonl"} <= left
    assert {f"global_step_2/{policy}/actor/huggingface/model.safetensors" for policy in ("alice", "carol")} <= left
    assert any(name.startswith("tensorboard/") for name in left)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged] == [0, 1, 2] and all("val/team/vote" in e["data"] for e in logged)

    saved = json.loads((tmp_path / "global_step_2" / "run.json").read_text())
    assert saved["config"]["seed"] == 0 and saved["agents_in_order"] == ["alice", "carol"]
    for mode, said in {"auto": "seed: saved 0, now 1", "disable": "holds the results of a run"}.items():
        with pytest.raises(ConfigError, match=said):
            start("seed=1", f"trainer.resume_mode={mode}")
    resumed, steps = start(
        "trainer.total_training_steps=3", "trainer.resume_mode=auto", "trainer.val_before_train=false"
    )
    assert len(steps) == 1 and resumed.step_number == 3
    assert sorted(resumed.history) == [0, 1, 2, 3], "the summary still begins at the beginning"
    assert (tmp_path / "global_step_3").is_dir() and not (tmp_path / "of_another_run.jsonl").exists()


def test_a_frozen_agent_and_a_learner_from_a_recipe(start):
    _, steps = start(
        "learner=leave_one_out", "credit=own", "agents.carol.trainable=false", "trainer.total_training_steps=1"
    )
    assert "agent/alice/grad_norm" in steps[0] and "agent/carol/grad_norm" not in steps[0]
    assert "agent/carol/score" in steps[0], "it plays all the same"


def test_agents_that_share_a_policy_and_one_round(start):
    trainer, steps = start(
        "agents.alice.policy=both",
        "agents.carol.policy=both",
        "runner=single_turn",
        "trainer.total_training_steps=1",
    )
    assert list(trainer.policies) == ["both"]
    assert steps[0]["agent/alice/grad_norm"] == steps[0]["agent/carol/grad_norm"]
    assert "team/gain" not in steps[0]
