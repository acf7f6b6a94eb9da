"""Adapters: servers play with the trainer's weights to the last digits, and what a checkpoint holds can be loaded."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from marl.evaluation.source import saved_weights
from tests.stack.builders import ADAPTERS


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(1, 25).view(2, 12)).logits


@pytest.mark.slow
def test_adapters_are_served_in_full_precision_and_exported_for_others(alone, cold_assets, tmp_path):
    live = alone(*ADAPTERS)
    for _ in range(2):
        metrics = live.step()
        for agent in ("alice", "carol"):
            assert metrics[f"agent/{agent}/log_prob_gap_max"] <= 1e-5
            assert metrics[f"agent/{agent}/grad_norm"] > 0
    live.wait(live.trainer.save())

    base = AutoModelForCausalLM.from_pretrained(cold_assets / "model", dtype=torch.float32)
    before = logits(base)
    actor = tmp_path / "global_step_2" / "alice" / "actor"
    merged, loaded = AutoModelForCausalLM.from_pretrained(
        saved_weights(tmp_path / "global_step_2", "alice"), dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    adapted = PeftModel.from_pretrained(base, actor / "lora_adapter")
    assert json.loads((actor / "lora_adapter" / "adapter_config.json").read_text())["lora_alpha"] == 8
    names = load_file(actor / "lora_adapter" / "adapter_model.safetensors")
    assert names and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names), "PEFT's names"
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=0)
    assert float((logits(merged) - before).abs().max()) > 1e-3, "it has learned"

    rows = live.trainer.batch_of(live.episodes()).rows["alice"]
    trained = live.wait(live.trainer.policies["alice"].compute_log_prob(rows))["log_probs"].values()
    other = alone(f"actor_rollout_ref.model.path={actor / 'huggingface'}")
    exported = other.wait(other.trainer.policies["alice"].compute_log_prob(rows))["log_probs"].values()
    torch.testing.assert_close(exported, trained, atol=1e-5, rtol=0)

    again = alone(*ADAPTERS, "trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    resumed = again.wait(again.trainer.policies["alice"].compute_log_prob(rows))["log_probs"].values()
    assert torch.equal(resumed, trained)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ADAPTERS], ids=["whole", "adapters"])
def test_verl_merges_the_shards_of_a_checkpoint(alone, tmp_path, options):
    """Into the weights that the checkpoint's own ``huggingface`` folder has, or their base and its adapter."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    live = alone(*options)
    live.step()
    live.wait(live.trainer.save())
    actor, target = tmp_path / "global_step_1" / "alice" / "actor", tmp_path / "merged"
    FSDPModelMerger(
        ModelMergerConfig(
            operation="merge", backend="fsdp", local_dir=str(actor), target_dir=str(target), trust_remote_code=False,
            hf_model_config_path=str(actor / "huggingface"),
        )
    ).merge_and_save()  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    if options:
        merged = PeftModel.from_pretrained(merged, target / "lora_adapter")
    own = AutoModelForCausalLM.from_pretrained(actor / "huggingface", dtype=torch.float32)
    assert float((logits(merged) - logits(own)).abs().max()) <= 0.05, "verl's merger rounds to bfloat16"
