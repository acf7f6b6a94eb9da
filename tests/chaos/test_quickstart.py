"""``kill -9`` in the quick start, and the same command again: the numbers of the unbroken run, to the last digit."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
STEPS = 24
SHORT = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=8", "trainer.logger=[file]")
WAYS = {
    "one process": (("resources.one_process=true", "trainer.save_freq=3"), (4, 10, 15)),
    "through Ray": ((), (12, 21)),
}
"""Settings, and the steps after which the run is killed; through Ray the quick start's own: it saves every tenth step."""


def start(folder, cache, *words):
    """``make quickstart``'s command, in a working directory of its own."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MARL_CACHE": str(cache)}
    output = open(folder / "output.txt", "a")  # noqa: SIM115 - the process keeps it
    return subprocess.Popen(
        [sys.executable, "-m", "marl.quickstart", *SHORT, *words],
        cwd=folder,
        env=environment,
        stdout=output,
        stderr=output,
    )


def runs_of(folder):
    return sorted(path for path in (folder / "outputs" / "quickstart").glob("*-seed0"))


def metrics_of(run):
    path = run / "metrics.jsonl"
    lines = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    )
    return [json.loads(line) for line in lines]


def timeless(data):
    """Without times, and what is computed from them."""
    own = ("timing", "perf/", "seconds")
    return {
        key: v
        for key, v in data.items()
        if not key.startswith(own) and not key.endswith(("mfu", "seconds")) and "memory" not in key
    }


def numbers(run):
    summary = json.loads((run / "summary.json").read_text())
    return timeless(summary), [(line["step"], timeless(line["data"])) for line in metrics_of(run)]


def kill_at(process, folder, step, after):
    """Kill it so many seconds after it has logged a step."""
    while not any(line["step"] >= step for run in runs_of(folder) for line in metrics_of(run)):
        assert process.poll() is None, (folder / "output.txt").read_text()[-2000:]
        time.sleep(0.01)
    time.sleep(after)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("way", WAYS)
def test_a_quick_start_that_was_killed_ends_with_the_numbers_of_the_unbroken_run(tmp_path, cache, way):
    words, kills = WAYS[way]
    assert start(tmp_path / "whole", cache, *words).wait() == 0
    (whole,) = runs_of(tmp_path / "whole")
    rng, killed = random.Random(0), tmp_path / "killed"
    for step in kills:
        kill_at(start(killed, cache, *words), killed, step, rng.uniform(0, 0.5))
    assert start(killed, cache, *words).wait() == 0, (killed / "output.txt").read_text()[-2000:]
    (run,) = runs_of(killed)
    assert len(json.loads((run / "run.json").read_text())["resumed"]) == len(kills)
    assert numbers(run) == numbers(whole)
    print(f"\n{way}: {len(kills)} kills, {len(metrics_of(run))} lines of metrics equal")
    assert start(killed, cache, *words, "trainer.total_training_steps=1").wait() == 0
    assert len(runs_of(killed)) == 2, "a finished run is left alone"
