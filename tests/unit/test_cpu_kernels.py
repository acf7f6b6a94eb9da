"""A run in bf16 on a CPU that has no fast kernels for it is warned of."""

import pytest
import torch

from marl.preflight import cpu_kernels
from marl.preflight.prepare import prepare

ACTOR, SERVER = "actor.fsdp_config.mixed_precision.param_dtype", "actor_rollout_ref.rollout.dtype"


@pytest.fixture
def warning(monkeypatch, compose_config, cold_assets, caplog):
    def warning(fast, *overrides):
        monkeypatch.setattr(cpu_kernels, "has_fast_bf16", lambda: fast)
        caplog.clear()
        prepare(compose_config(f"assets={cold_assets}", *overrides))
        return " ".join(record.getMessage() for record in caplog.records if "bf16" in record.getMessage())

    return warning


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["precision=bf16"], f"actor_rollout_ref.{ACTOR} is bf16"),
        (["+policies.carol.precision=bf16"], f"policies.carol: actor_rollout_ref.{ACTOR} is bf16"),
        ([f"{SERVER}=bfloat16"], f"{SERVER} is bf16"),
        (["learner=mappo", "critic.fsdp.mixed_precision.param_dtype=bf16"], "critic.fsdp.mixed_precision.param_dtype is bf16"),
    ],
)  # fmt: skip
def test_whatever_computes_in_bf16_is_named(warning, overrides, key):
    assert key in warning(False, *overrides)
    assert not warning(True, *overrides)


def test_training_on_rows_is_warned_of_too(warning, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "what is 1 plus 2 ?", "answer": "#### 3"}\n' * 64)
    data = ("learner=grpo", "method=sft", f"data.train_files={rows}", "data.val_files=null")
    assert ACTOR in warning(False, "precision=bf16", *data)


@pytest.mark.slow
def test_full_precision_gpus_and_ensembles_are_not_warned_of(warning):
    assert not warning(False)
    assert not warning(False, "learner=mappo")
    assert not warning(False, "precision=bf16", "+ensemble={}")
    attention = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    assert not warning(False, "hardware=gpu", "precision=bf16", attention, "actor_rollout_ref.rollout.name=hf")


def test_the_cpu_is_asked(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=supported: answer)
        assert cpu_kernels.has_fast_bf16() is supported
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu_kernels.has_fast_bf16()
