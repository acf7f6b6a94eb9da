"""docs/algorithms.md: its tables name what there is, and its own learner and credit train two agents."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from marl.learners import CREDITS, LEARNERS

ROOT = Path(__file__).parents[2]
OF_LIBRARIES = re.compile(
    r"Warning|site-packages|deprecated|NUMA|FSDP|RLHFDataset|dataset len|monkey patch|rank ?0|examples/s|it/s",
    re.IGNORECASE,
)
"""Output of verl, torch, transformers and datasets while two agents train."""
DOC = (ROOT / "docs" / "algorithms.md").read_text()


def table(heading):
    section = DOC.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_learner_and_credit_stands_in_its_table():
    ours = {name for name in LEARNERS.names() if LEARNERS.get(name).__module__.startswith("marl.")}
    shipped = {path.stem for path in (ROOT / "configs" / "learner").glob("*.yaml")}
    assert table("Learners") == ours | shipped
    assert table("Credit") == {name for name in CREDITS.names() if CREDITS.get(name).__module__.startswith("marl.")}


@pytest.mark.slow
def test_the_file_of_ones_own_trains_by_its_command(cold_assets, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
    setting, module, *words = command.split()
    assert [setting, module, *words[:1]] == ["VERL_USE_EXTERNAL_MODULES=best", "python", "-m"] and words[-1] == "…"
    (tmp_path / "best.py").write_text(code)
    here = [
        "--config-name=quickstart", f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}/run",
        "resources.one_process=true", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.logger=[file]",
    ]  # fmt: skip
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "best",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    arguments = [sys.executable, *words[:2], here[0], *words[2:-1], *here[1:]]
    done = subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search("^a step: 4 tasks x 4 samples", done.stdout, re.MULTILINE)
    assert not OF_LIBRARIES.findall(done.stdout + done.stderr)
    steps = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "credit/mean" in step]
    assert len(trained) == 2 and all(step["agent/alice/grad_norm"] > 0 for step in trained)
