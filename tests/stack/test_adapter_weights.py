"""Weights of adapters that come from elsewhere and go elsewhere: warm starts, merged models, a base of another precision."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stack.builders import (
    ADAPTED,
    adapter_engine,
    adapter_weights,
    merged_weights,
    same_weights,
    trainable,
    updated,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def trained(alone, tmp_path):
    """A run of one step, and its checkpoint."""
    live = alone(*ADAPTED, f"trainer.default_local_dir={tmp_path / 'first'}")
    live.step()
    live.wait(live.trainer.save())
    return live, tmp_path / "first" / "global_step_1"


def log_probs(live, policy, rows):
    return live.wait(live.trainer.policies[policy].compute_log_prob(rows))["log_probs"].values()


def test_an_adapter_starts_from_another_runs(alone, trained):
    """alice's from carol's folder; carol's own from nothing, which changes no log-prob."""
    first, checkpoint = trained
    folder = checkpoint / "carol" / "actor" / "lora_adapter"
    live = alone(*ADAPTED, f"+policies.alice.model.lora_adapter_path={folder}")
    assert same_weights(adapter_weights(live, "alice"), adapter_weights(first, "carol"))
    rows = trainable(live, 0)
    assert torch.equal(log_probs(live, "alice", rows["alice"]), log_probs(first, "carol", rows["alice"]))
    reference = live.wait(live.trainer.policies["carol"].compute_ref_log_prob(rows["carol"]))["log_probs"].values()
    assert torch.equal(log_probs(live, "carol", rows["carol"]), reference)
    assert not torch.equal(log_probs(live, "alice", rows["alice"]), log_probs(live, "carol", rows["alice"]))
    metrics = live.step()
    assert metrics["agent/alice/log_prob_gap_max"] <= 1e-5 and metrics["agent/alice/grad_norm"] > 0


def test_merged_models_go_on_as_whole_ones(alone, trained):
    """``huggingface/`` of every policy, under ``sharing=individual``; and as a base of new adapters."""
    first, checkpoint = trained
    models = {name: checkpoint / name / "actor" / "huggingface" for name in ("alice", "carol")}
    whole = alone("sharing=individual", *(f"+policies.{name}.model.path={path}" for name, path in models.items()))
    rows = trainable(whole, 1)
    for name in models:
        torch.testing.assert_close(
            log_probs(whole, name, rows[name]), log_probs(first, name, rows[name]), atol=1e-5, rtol=0
        )
    assert whole.step()["agent/carol/log_prob_gap_max"] <= 1e-5
    again = alone(*ADAPTED, f"actor_rollout_ref.model.path={models['carol']}")
    assert same_weights(dict(adapter_engine(again).base_weights()), merged_weights(first, "carol"))
    assert not same_weights(dict(adapter_engine(first).base_weights()), dict(adapter_engine(again).base_weights()))


def rounded_copy(model, folder):
    """The model with weights rounded to bf16, saved in full precision, and its tokenizer."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def held(live):
    """Bytes of the base in the trainer."""
    return sum(weight.numel() * weight.element_size() for _, weight in adapter_engine(live).base_shards())


def test_a_base_in_half_precision_trains_its_adapters_in_full(alone, cold_assets, tmp_path):
    """As a full base of the same numbers does, to the last bit; the base takes half the memory."""
    full = alone(*ADAPTED, f"actor_rollout_ref.model.path={rounded_copy(cold_assets / 'model', tmp_path / 'full')}")
    half = alone(*ADAPTED, "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    assert 2 * held(half) == held(full)
    rows = trainable(full, 2)
    for name in ("alice", "carol"):  # PEFT draws first weights in the base's precision
        adapter_engine(half).load_adapter_state(name, adapter_engine(full).adapter_state(name))
    for name in ("alice", "carol", "alice"):
        one, other = updated(full, name, rows[name]), updated(half, name, rows[name])
        assert one["grad_norm"] == other["grad_norm"] > 0
    for name in ("alice", "carol"):
        assert same_weights(adapter_weights(full, name), adapter_weights(half, name))
    half.wait(half.trainer.sync_weights())
    assert half.step()["agent/alice/log_prob_gap_max"] <= 1e-5
    merged = merged_weights(half, "alice")
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16}
