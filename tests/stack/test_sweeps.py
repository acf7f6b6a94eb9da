"""A sweep side by side, by Ray: real runs, one of which is refused; then the same command again."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

RUN = (
    "resources.one_process=true",
    "trainer.total_training_steps=1",
    "trainer.test_freq=1",
    "data.train_batch_size=4,8",
    "trainer.logger=[file,tensorboard]",
    "trainer.log_val_generations=1",
)


@pytest.mark.slow
def test_runs_train_side_by_side_and_the_same_command_does_what_is_left(cold_assets, tmp_path):
    def sweep(*words):
        command = [
            sys.executable,
            "-m",
            "marl",
            "train",
            "-m",
            "--config-name",
            "quickstart",
            f"assets={cold_assets}",
            *RUN,
        ]
        command += ["seed=0", "hydra/launcher=marl_ray", "hydra.launcher.num_cpus=1", *words]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        }
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = sweep("learner=grpo", "actor_rollout_ref.rollout.n=4,0")
    assert done.returncode == 2 and "2 of the sweep's runs are refused, so none starts" in done.stderr, (
        done.stdout + done.stderr
    )
    assert not list(tmp_path.glob("outputs/sweeps/*/*/run.json"))
    done = sweep("learner=grpo", "actor_rollout_ref.rollout.n=4")
    assert done.returncode == 0 and "2 of 2 runs have finished" in done.stdout, done.stdout + done.stderr
    runs = sorted(path.parent for path in tmp_path.glob("outputs/sweeps/*/*/run.json"))
    assert [path.name for path in runs] == ["data.train_batch_size=4", "data.train_batch_size=8"]
    for run in runs:
        assert "finished" in json.loads((run / "run.json").read_text())
        assert json.loads((run / "summary.json").read_text())["seconds"] > 0
        events = b"".join(path.read_bytes() for path in (run / "tensorboard").iterdir())
        assert b"val/episode_1" in events and b"train/episode_1" in events, "sample episodes are in the trackers"
    again = sweep("learner=grpo", "actor_rollout_ref.rollout.n=4")
    assert "2 of 2 runs" in again.stdout and "skipping them" in again.stdout and "queued" not in again.stdout


@pytest.mark.slow
def test_a_sweep_that_is_ended_leaves_no_run_behind(cold_assets, tmp_path):
    words = [
        *RUN,
        "data.train_batch_size=4",
        "trainer.total_training_steps=4000",
        "trainer.save_freq=1",
        "learner=grpo,mappo",
    ]
    command = [sys.executable, "-m", "marl", "train", "-m", "--config-name", "quickstart", f"assets={cold_assets}"]
    command += [
        *(word for word in words if word not in RUN[1:4]),
        "hydra/launcher=marl_ray",
        "hydra.launcher.num_cpus=1",
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    }
    with open(tmp_path / "said", "w") as said:
        sweep = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: len(list(tmp_path.glob("outputs/sweeps/*/*/latest_checkpointed_iteration.txt"))) == 2, 240)
        assert len(runs_of(tmp_path)) == 2, "side by side"
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(60) == 143
        wait_for(lambda: not runs_of(tmp_path), 60)
    finally:
        sweep.kill()
    assert "Traceback" not in (tmp_path / "said").read_text()


def runs_of(folder):
    """The processes of runs that a sweep in this folder has started."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if "marl.main" in words and process.info["cwd"] == str(folder):
            found.append(process)
    return found


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.5)
