"""The quick start's run on one GPU, two policies in one pool, for a few steps. Run by ``make gpu-smoke``."""

from importlib.util import find_spec

import pytest
import torch

from marl.main import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session", autouse=True)
def machine():
    """A machine that lacks something fails: a skipped smoke test would pass for a proof."""
    assert torch.cuda.is_available(), "torch finds no GPU; run make gpu-smoke on a machine with one"
    assert find_spec("vllm"), "vLLM is not installed; run make gpu"


CASES = {
    "hf": ("actor_rollout_ref.rollout.name=hf",),
    "vllm": ("actor_rollout_ref.rollout.name=vllm",),
    "vllm, adapters on one base": ("actor_rollout_ref.rollout.name=vllm", "sharing=lora"),
}


@pytest.mark.parametrize("case", CASES)
def test_two_policies_on_one_gpu(compose_config, wide_assets, tmp_path, case):
    steps = []
    config = compose_config(
        "hardware=gpu",
        *CASES[case],
        "resources.placement=colocated",
        "trainer.n_gpus_per_node=1",
        "precision=fp32",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"assets={wide_assets}",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=3",
        "trainer.logger=[]",
    )
    run(config, lambda step, total, metrics: steps.append(metrics))
    gaps = [value for metrics in steps for key, value in metrics.items() if key.endswith("log_prob_gap_max")]
    assert len(gaps) == 6 and max(gaps) < 1e-2
