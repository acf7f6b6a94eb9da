"""A run in bf16 on a CPU that has no instructions for it is warned of."""

import pytest
import torch

from marl.preflight.prepare import prepare


@pytest.fixture
def warned(monkeypatch, compose_config, cold_assets, caplog):
    def warned(capability, *overrides):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        caplog.clear()
        prepare(compose_config(f"assets={cold_assets}", *overrides))
        return "bf16 is slow on this CPU" in caplog.text

    return warned


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=bf16"],
        ["+policies.carol.precision=bf16"],
        ["actor_rollout_ref.rollout.dtype=bfloat16"],
        ["learner=mappo", "critic.fsdp.mixed_precision.param_dtype=bf16"],
    ],
)
def test_whoever_computes_in_bf16(warned, overrides):
    assert warned("AVX2", *overrides)
    assert not warned("AVX512", *overrides)


def test_full_precision_and_gpus_are_not_warned_of(warned):
    assert not warned("AVX2")
    assert not warned("AVX2", "learner=mappo")
    attention = "override_config.attn_implementation=sdpa"
    assert not warned("AVX2", "hardware=gpu", "precision=bf16", f"+actor_rollout_ref.model.{attention}")
