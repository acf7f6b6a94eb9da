"""Packages that a run on this machine's GPUs needs are named before the start."""

import importlib.util
import json

import pytest
import torch

from marl.config.errors import ConfigError
from marl.preflight import verl_settings as packages
from marl.preflight.prepare import prepare

SDPA = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"


@pytest.fixture
def with_packages(monkeypatch, compose_config, cold_assets):
    """Prepare a GPU run where these packages are installed, and a GPU is there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def with_packages(installed, *overrides):
        monkeypatch.setattr(packages, "find_spec", lambda name: name in installed or None, raising=False)
        prepare(compose_config(f"assets={cold_assets}", "hardware=gpu", *overrides))

    return with_packages


@pytest.mark.parametrize(
    ("installed", "overrides", "said"),
    [
        (["flash_attn"], [], "actor_rollout_ref.rollout.name=vllm: the package vllm is not installed; install it with pip"),
        (["vllm"], ["actor_rollout_ref.rollout.name=sglang"], "actor_rollout_ref.rollout.name=sglang: the package sglang"),
        (["vllm"], [], f"flash-attn is not installed; install it .*or set [{SDPA[0]}]{SDPA[1:]}"),
        (["vllm"], ["learner=mappo", SDPA], "critic.model.override_config.attn_implementation=flash_attention_2"),
        (["flash_attn"], ["actor_rollout_ref.rollout.name=hf", "+policies.carol.rollout.name=vllm"],
         "policies.carol.rollout.name=vllm"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_remedy(with_packages, installed, overrides, said):
    with pytest.raises(ConfigError, match=said):
        with_packages(installed, *overrides)


def test_what_is_installed_or_not_used_is_not_asked_for(with_packages):
    with_packages(["vllm", "flash_attn"])
    with_packages(["vllm", "kernels"])
    with_packages([], SDPA, "actor_rollout_ref.rollout.name=hf")


def test_a_cluster_has_packages_of_its_own(with_packages, monkeypatch):
    with_packages([], "+ray_kwargs.ray_init.runtime_env={pip: [vllm, flash-attn]}")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with_packages([])
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with_packages([])


def test_an_ensemble_starts_no_server_and_needs_no_package_of_one(with_packages):
    with_packages([], "+ensemble={}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["precision=fp32"],
            r"actor.fsdp_config.mixed_precision.param_dtype=fp32 .*only fp16 and bf16: set [+]actor_rollout",
        ),
        (["+policies.carol.precision=fp32"], "policies.carol"),
        (
            ["learner=mappo", "critic.fsdp.mixed_precision.param_dtype=fp32"],
            "critic.fsdp.mixed_precision.param_dtype=fp32",
        ),
    ],
)
def test_flash_attention_has_no_full_precision_on_any_machine(with_packages, monkeypatch, overrides, said):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ConfigError, match=said):
        with_packages(["vllm", "flash_attn"], *overrides)
    with_packages(["vllm", "flash_attn"], SDPA, SDPA.replace("actor_rollout_ref", "critic"), *overrides)


@pytest.fixture
def without_math_verify(monkeypatch, compose_config, cold_assets, tmp_path):
    """Prepare a run on rows of a data source where math-verify is not installed."""
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: (name != "math_verify" and usual(name, *of)) or None
    )

    def without_math_verify(source, *overrides):
        question = [{"role": "user", "content": "2+2?"}]
        row = {"data_source": source, "prompt": question, "reward_model": {"style": "rule", "ground_truth": "4"}}
        (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
        files = [f"data.{key}={tmp_path}/rows.jsonl" for key in ("train_files", "val_files")]
        here = [f"actor_rollout_ref.model.path={cold_assets}/model", f"trainer.default_local_dir={tmp_path}/run"]
        prepare(compose_config("hardware=cpu", "data.train_batch_size=4", *files, *here, *overrides, name="marl"))

    return without_math_verify


def test_rows_that_math_verify_scores_are_refused_without_it(without_math_verify, tmp_path):
    with pytest.raises(ConfigError, match=r"^data_source=own/sums: .* pip install 'marl\[math\]', or score these rows"):
        without_math_verify("own/sums")
    without_math_verify("openai/gsm8k")
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
    )
    without_math_verify("own/sums", f"reward.custom_reward_function.path={tmp_path}/mine.py")
