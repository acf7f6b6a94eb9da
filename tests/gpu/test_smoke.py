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
CRITIC = ("learner=mappo", "+critic.model.override_config.attn_implementation=sdpa", "trainer.save_freq=2")


def overrides(folder, assets, *own):
    return (
        "hardware=gpu",
        *own,
        "resources.placement=colocated",
        "trainer.n_gpus_per_node=1",
        "precision=fp32",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
        # vLLM refuses to measure what is left of a GPU on which others free memory meanwhile
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=268435456",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"assets={assets}",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[]",
        "ray_kwargs.ray_init.num_cpus=4",
    )


def gaps_of(config):
    """The largest difference between log-probs of server and trainer, of every step and policy."""
    steps = []
    run(config, lambda step, total, metrics: steps.append(metrics))
    return [value for metrics in steps for key, value in metrics.items() if key.endswith("log_prob_gap_max")]


@pytest.mark.parametrize("case", CASES)
def test_two_policies_on_one_gpu(compose_config, wide_assets, tmp_path, case):
    config = compose_config(*overrides(tmp_path, wide_assets, *CASES[case]), "trainer.total_training_steps=3")
    gaps = gaps_of(config)
    assert len(gaps) == 6 and max(gaps) < 1e-2


def test_a_run_with_a_critic_goes_on_from_its_checkpoint(compose_config, wide_assets, tmp_path):
    settings = overrides(tmp_path, wide_assets, *CASES["hf"], *CRITIC)
    first = gaps_of(compose_config(*settings, "trainer.total_training_steps=2"))
    resumed = gaps_of(compose_config(*settings, "trainer.total_training_steps=3", "trainer.resume_mode=auto"))
    assert (len(first), len(resumed)) == (4, 2) and max(first + resumed) < 1e-2
