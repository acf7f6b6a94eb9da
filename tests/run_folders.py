"""Folders of runs that nobody trained, for tests of what reads them."""

import json


def write_run(root, name, votes, seed=0, learner="grpo", finished=True, **settings):
    """Write a run's folder: its votes by validation step, and settings that differ."""
    folder = root / "sweep" / name
    folder.mkdir(parents=True)
    config = {
        "seed": seed,
        "data": {"seed": seed, "train_files": [f"cache/x-seed{seed}/train.parquet"]},
        "learner": {"name": learner, "gamma": 1.0},
        "runner": {"name": "debate"},
        "credit": {"name": "own"},
        "agents": {"a": {}},
        "trainer": {
            "experiment_name": "mine",
            "default_local_dir": str(folder),
            "rollout_data_dir": f"{folder}/rollouts",
            "validation_data_dir": f"{folder}/validation",
            "total_training_steps": 4,
        },
    } | settings
    record = {
        "started": "now",
        "config": config,
        "agents_in_order": ["a"],
        "contents": {"data.train_files": "sha256:1"},
    }
    record |= {"versions": {"verl": "0.9.1"}} | ({"finished": "then"} if finished else {})
    (folder / "run.json").write_text(json.dumps(record))
    step = {
        "timing_s/step": 2.0,
        "timing_s/update": 1.5,
        "team/episodes": 4.0,
        "agent/a/turns": 2.0,
        "agent/a/response_length": 5.0,
    }
    lines = [{"step": at, "data": {"val/team/vote": vote} | (step if at else {})} for at, vote in votes.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
