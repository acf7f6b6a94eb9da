"""Packages that a run on this machine's GPUs needs are named before the start."""

import pytest
import torch

from marl.config.errors import ConfigError
from marl.preflight import packages
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
