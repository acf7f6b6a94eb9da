"""Adapters as the configuration describes them: PEFT's arguments for verl's keys, and whether a model has the layers."""

from typing import Any

import torch
from omegaconf import OmegaConf
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from marl.config.errors import ConfigError
from marl.modules.pretrained import line

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


def check_adapter(config: Any, model: Any, key: str, linear_only: bool) -> None:
    """Raise ConfigError where a model lacks the layers that an adapter changes, or where ``linear_only`` servers cannot serve
    one of them. Makes no weights."""
    targets = f"{key}.target_modules={model.target_modules}"
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
        try:
            inject_adapter_in_model(LoraConfig(**lora_arguments(model)), made)
        except ValueError as error:
            raise ConfigError(f"{targets}: {line(error)}; expected {layers_of(config)}, or all-linear") from None
    added = [name for name, _ in made.named_parameters() if ".lora_" in name]
    other = [name for name in added if not name.endswith((".lora_A.default.weight", ".lora_B.default.weight"))]
    if linear_only and other:
        raise ConfigError(
            f"{targets}: sharing=lora serves adapters of linear layers, and {other[0].split('.lora_')[0]} is none; expected "
            f"{layers_of(config)}, or all-linear"
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
