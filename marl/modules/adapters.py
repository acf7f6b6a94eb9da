"""Adapters as the configuration describes them: PEFT's arguments for verl's keys, and whether a model has the layers."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from marl.config.errors import ConfigError, line

logger = logging.getLogger(__name__)

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files of an adapter."""
OTHER_KINDS = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
"""PEFT's settings of adapters that are more than one pair of matrices a layer, all of one rank and scale."""
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""PEFT's ``init_lora_weights`` that leave the base as it is; others (PiSSA, OLoRA, CorDA, LoftQ …) take the adapter out of it."""
LORA_KEYS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "target_parameters": "target_parameters",
}
"""verl's keys of a model, and PEFT's of an adapter."""


def lora_arguments(model: Any) -> dict[str, Any]:
    """Arguments of ``LoraConfig`` in a policy's ``actor_rollout_ref.model``."""
    plain = OmegaConf.to_container(model, resolve=True)
    assert isinstance(plain, dict)
    return {theirs: plain[ours] for ours, theirs in LORA_KEYS.items() if plain.get(ours) is not None}


def first_weights(model: Any) -> Path | None:
    """The file of the weights that ``model.lora_adapter_path`` starts an adapter from."""
    return None if model.lora_adapter_path is None else Path(model.lora_adapter_path) / WEIGHTS


def added_shapes(config: Any, model: Any, targets: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that an adapter adds to a model, by their names in it. Makes no weights. Raises ConfigError
    where the model lacks its layers."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
        try:
            inject_adapter_in_model(LoraConfig(**lora_arguments(model)), made)
        except Exception as error:  # PEFT raises whatever a wrong value leads it to
            raise ConfigError(f"{targets}: {line(error)}; expected {layers_of(config)}, or all-linear") from None
    return {name: tuple(added.shape) for name, added in made.named_parameters() if ".lora_" in name}


def check_adapter(config: Any, model: Any, key: str, linear_only: bool) -> None:
    """Raise ConfigError where a model lacks the layers that an adapter changes, or where ``linear_only`` servers cannot serve
    one of them."""
    targets = f"{key}.target_modules={model.target_modules}"
    added = added_shapes(config, model, targets)
    other = [name for name in added if not name.endswith((".lora_A.default.weight", ".lora_B.default.weight"))]
    if linear_only and other:
        raise ConfigError(
            f"{targets}: sharing=lora serves adapters of linear layers, and {other[0].split('.lora_')[0]} is none; expected "
            f"{layers_of(config)}, or all-linear"
        )


def check_start(config: Any, model: Any, key: str) -> None:
    """Raise ConfigError where ``lora_adapter_path`` is no adapter that the configuration describes on this model; warn where
    it was trained on a model of another name."""
    where = f"{key}.lora_adapter_path={model.lora_adapter_path}"
    settings, saved = saved_adapter(Path(model.lora_adapter_path), where)
    check_kind(settings, model, where, key)
    check_shapes(saved, added_shapes(config, model, where), where, key)
    base = settings.get("base_model_name_or_path")
    if base is not None and base != model.path and Path(base).resolve() != Path(model.path).resolve():
        logger.warning("%s: the adapter was trained on %s, and this run puts it on %s", where, base, model.path)


def saved_adapter(folder: Path, where: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """PEFT's settings of an adapter, and the shapes of its weights."""
    missing = [name for name in (SETTINGS, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{where}: there is no {missing[0]}; expected a folder that PEFT saved, such as a policy's lora_adapter"
        )
    try:
        settings = json.loads((folder / SETTINGS).read_text())
        with safe_open(folder / WEIGHTS, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
        if not isinstance(settings, dict):
            raise ValueError(f"{SETTINGS} holds a {type(settings).__name__} in place of settings")
        return settings, shapes
    except (ValueError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"{where}: it cannot be read: {line(error)}; expected whole files, save the adapter again"
        ) from None


def check_kind(settings: Mapping[str, Any], model: Any, where: str, key: str) -> None:
    other = [name for name in OTHER_KINDS if settings.get(name)]
    if settings.get("init_lora_weights") not in PLAIN_STARTS:
        raise ConfigError(
            f"{where}: its {SETTINGS} says init_lora_weights={settings['init_lora_weights']}, which changes the base's weights too; "
            "expected an adapter of an unchanged base; merge it into the base that PEFT changed, and set model.path to the result"
        )
    if settings.get("peft_type") != "LORA" or other:
        kind = f"{other[0]}={settings[other[0]]}" if other else f"peft_type={settings.get('peft_type')}"
        raise ConfigError(
            f"{where}: its {SETTINGS} says {kind}; expected plain LoRA of one rank; merge it into model.path"
        )
    for ours, theirs in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if settings.get(theirs) != model[ours]:
            raise ConfigError(
                f"{where}: its {theirs} is {settings.get(theirs)}, and {key}.{ours}={model[ours]}; set {ours} to the adapter's"
            )


def check_shapes(
    saved: Mapping[str, tuple[int, ...]], added: Mapping[str, tuple[int, ...]], where: str, key: str
) -> None:
    wanted = {f"base_model.model.{name.replace('.default.', '.')}": shape for name, shape in added.items()}
    for name in sorted({*saved, *wanted}):
        if name not in saved or name not in wanted:
            has, lacks = ("it", "this run's") if name in saved else ("this run's", "it")
            raise ConfigError(
                f"{where}: {has} changes {name.split('.lora_')[0]}, which {lacks} does not; expected an adapter of the same layers: "
                f"set {key}.target_modules to its own, or {key}.path to its base"
            )
        if saved[name] != wanted[name]:
            raise ConfigError(
                f"{where}: its {name} has the shape {saved[name]}, and on this model {wanted[name]} fits; set {key}.path to the "
                "model that the adapter was trained on"
            )


def check_adapter_name(policy: str) -> None:
    """Raise ConfigError for a name that torch, in whose ``ModuleDict`` PEFT keeps adapters, has taken."""
    if hasattr(torch.nn.ModuleDict(), policy):
        raise ConfigError(
            f"policy {policy!r}: under sharing=lora a policy is an adapter, and torch.nn.ModuleDict has an attribute of this name; "
            f"expected another name, such as {policy}_1"
        )


def layers_of(config: Any) -> str:
    """The names that ``target_modules`` may have, as text."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {name.split(".")[-1]: None for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    return f"some of {', '.join(found)}"
