"""Other layouts of servers, each a run of its own: replicas, tensor parallelism, two engines, one pool, adapters, and two runs on one host."""

import json
import os
import subprocess
import sys

import pytest

from tests.vllm.builders import CLOSE, SETTINGS, abandoned, engine_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ONE_POLICY = ("agents.alice.policy=team", "agents.carol.policy=team")
LAYOUTS = {
    "two replicas, asked by an episode worker": (*ONE_POLICY, "trainer.n_gpus_per_node=2", "controller.num_workers=1"),
    "tensor parallel": (
        *ONE_POLICY,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ),
    "one pool and a critic": ("learner=mappo", "resources.placement=colocated"),
    "adapters": (
        *ONE_POLICY,
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.rollout.load_format=safetensors",
    ),
    "adapters on one base, tensor parallel": (
        "sharing=lora",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_have_their_trainers_weights(start, layout):
    before = abandoned()
    with start(*LAYOUTS[layout]) as live:
        gaps_stay_close(live)
    # vLLM's channel between the ranks of a tensor-parallel group on a CPU, 4 MB a rank, outlives its processes
    left = [path for path in abandoned() - before if "-cpushm_" not in path]
    assert len(left) <= len(live.trainer.policies), "an engine may leave one segment"


def gaps_stay_close(live):
    for _ in range(2):
        metrics = live.step()
        largest = [value for key, value in metrics.items() if key.endswith("log_prob_gap_max")]
        assert len(largest) == 2 and max(largest) <= CLOSE


def test_a_policy_on_vllm_and_one_on_hf_learn_together(start):
    with start("+policies.carol.rollout.name=hf") as live:
        engine_of(live, "alice")
        with pytest.raises(StopIteration):
            engine_of(live, "carol")
        gaps_stay_close(live)


def command(folder, assets, *overrides):
    words = (*SETTINGS[:-1], f"assets={assets}", f"trainer.default_local_dir={folder}", *ONE_POLICY, *overrides)
    return [sys.executable, "-m", "marl.main", "--config-name", "split_information", "trainer.logger=[file]", *words]


def test_two_runs_on_one_host_keep_their_weights_apart(wide_assets, tmp_path):
    """Ray's job id, by which verl names the sockets, is the same in both."""
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = [
        subprocess.Popen(command(folder, wide_assets, "trainer.total_training_steps=4", f"seed={seed}"), env=os.environ)
        for seed, folder in enumerate(folders)
    ]
    assert [run.wait(900) for run in runs] == [0, 0]
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        gaps = [
            value for line in lines for key, value in line.get("data", line).items() if key.endswith("log_prob_gap_max")
        ]
        assert len(gaps) >= 8 and max(gaps) <= CLOSE
