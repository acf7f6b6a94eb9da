"""A run outlives its vLLM servers: an engine or a server dies or hangs, all is built anew, and training goes on."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from tests.chaos.hits import Hits
from tests.vllm.builders import CLOSE, SETTINGS, abandoned

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
STEPS, TASKS, SAMPLES = 10, 4, 2
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = (
    (2, 0.1, "VLLM::EngineCore", KILL),
    (4, 0.1, "RunServer", KILL),
    (6, 0.1, "PolicyWorker", KILL),
    (8, 0.1, "VLLM::EngineCore", STOP),
)
"""(step after which, seconds, kind of process, signal). The engine is a child of the server, which dies without ending it."""
RUN = (
    "agents.alice.policy=team", "agents.carol.policy=team", "trainer.save_freq=1",
    "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[file]", f"data.train_batch_size={TASKS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}", "resources.request_timeout_s=20", "resources.sync_timeout_s=20",
    "controller.episode_timeout_s=40",
)  # fmt: skip


def places_of(folder, assets):
    return f"assets={assets}", f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts"


def engines():
    """Processes of engines that live, whoever their parents are."""
    return [process for process in psutil.process_iter() if any("VLLM::" in word for word in cmdline(process))]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class WatchedHits(Hits):
    """Counts engines after every step too."""

    def __init__(self, *plan):
        super().__init__(*plan)
        self.engines = Counter()

    def __call__(self, step, total, metrics):
        self.engines[len(engines())] += 1
        super().__call__(step, total, metrics)


def test_a_run_outlives_its_servers(compose_config, wide_assets, tmp_path, record_property):
    from marl.main import run

    before, hits = abandoned(), WatchedHits(*FAULTS)
    assert not engines()
    places = places_of(tmp_path, wide_assets)
    length = f"trainer.total_training_steps={STEPS}"
    run(compose_config(*SETTINGS, *RUN, length, *places, name="split_information"), hits)
    record_property("waits", hits.told())

    faults = [fault["error"] for fault in json.loads((tmp_path / "run.json").read_text())["restarted"]]
    assert len(faults) == len(FAULTS), faults
    assert "EngineDeadError" in faults[0] and "20 s" in faults[3]
    stacks = {path.name: path.read_text() for path in tmp_path.glob("stacks/*/*")}
    assert any("EngineCore" in name and "stopped" in text for name, text in stacks.items()), sorted(stacks)
    assert not engines() and len(hits.engines) == 1, "an engine has outlived its server"
    assert not abandoned() - before
    every_episode_once(tmp_path, STEPS)
    servers_answered_with_the_trainers_weights(tmp_path, STEPS)


def test_the_next_run_ends_the_engines_of_a_killed_driver_and_goes_on(wide_assets, tmp_path):
    steps, before = 3, abandoned()
    words = (*SETTINGS, *RUN, f"trainer.total_training_steps={steps}", "trainer.resume_mode=auto")
    command = [sys.executable, "-m", "marl.main", "--config-name", "split_information", *words]
    command += places_of(tmp_path, wide_assets)
    with subprocess.Popen(command, start_new_session=True) as driver:
        ends = time.monotonic() + 600
        while not (tmp_path / "global_step_1").exists():
            assert time.monotonic() < ends and driver.poll() is None
            time.sleep(0.1)
        first = engines()
        driver.kill()
    subprocess.run(command, check=True, timeout=900)
    assert first and not engines() and not abandoned() - before
    every_episode_once(tmp_path, steps)
    servers_answered_with_the_trainers_weights(tmp_path, steps)


def every_episode_once(folder, steps):
    """Each step has played its tasks, each as often as it should be, and no turn is there twice."""
    for step in range(1, steps + 1):
        turns = [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").open()]
        played = Counter((turn["task"], turn["sample"], turn["turn"]) for turn in turns)
        assert set(played.values()) == {1}, played
        assert len({(task, sample) for task, sample, _ in played}) == TASKS * SAMPLES


def servers_answered_with_the_trainers_weights(folder, steps):
    """Log-probs of servers and trainer agree in every step, also in those after the servers were started again."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    gaps = {line["step"]: [v for key, v in line["data"].items() if key.endswith("log_prob_gap_max")] for line in lines}
    assert set(range(1, steps + 1)) <= {step for step, found in gaps.items() if found}
    assert max(gap for found in gaps.values() for gap in found) <= CLOSE
