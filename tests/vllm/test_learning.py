"""The quick start's learning task ends on vLLM's servers where it ends on ``hf``."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from marl.quickstart.assets import RECIPES, ensure

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
STEPS = 30


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets") / "learning"
    ensure(folder, replace(RECIPES["split_information"], heads=2), seed=0)
    return folder


ENGINES = {"hf": ("hardware=cpu", "resources.one_process=true"), "vllm": ("hardware=cpu_vllm",)}


def accuracy(assets, folder, engine):
    """The share of right teams after the last step."""
    words = [
        *ENGINES[engine], f"assets={assets}", f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.logger=[file]",
    ]  # fmt: skip
    command = [sys.executable, "-m", "marl.main", "--config-name", "split_information", *words]
    subprocess.run(command, check=True, timeout=1800)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [line.get("data", line).get("val/team/vote") for line in lines]
    return [score for score in scores if score is not None][-1]


def test_the_learning_task_ends_where_hf_ends(assets, tmp_path, record_property):
    ends = {engine: accuracy(assets, tmp_path / engine, engine) for engine in ENGINES}
    record_property("ends", ends)
    assert min(ends.values()) > 0.8
    assert abs(ends["hf"] - ends["vllm"]) <= 0.05, ends
