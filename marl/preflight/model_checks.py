"""Checks of a model's weights and its size."""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from marl.config.errors import ConfigError
from marl.modules.pretrained import WEIGHTS, line
from marl.preflight.memory import ModelSize
from marl.utils import pickles

INDEX = "model.safetensors.index.json"


def check_weights(model: Any, key: str) -> None:
    """Raise ConfigError where a local folder has no weights, or some that were cut short. What is on the hub is not read."""
    folder = Path(model.path)
    if not folder.is_dir():
        return
    index = folder / INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{key}.path={model.path}: {INDEX} cannot be read: {line(error)}; expected whole files, save the model again"
            ) from None
        missing = sorted(name for name in named if not (folder / str(name)).is_file())
        if missing:
            raise ConfigError(
                f"{key}.path={model.path}: {missing[0]} is missing; expected {len(named)} files of weights"
            )
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"{key}.path={model.path}: there are no weights; expected one of {', '.join(WEIGHTS)}")
    for file in files:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, "pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{key}.path={model.path}: {file.name} cannot be read: {line(error)}; expected whole safetensors, "
                    "save or download the model again"
                ) from None
    if not any(file.suffix == ".safetensors" for file in files):  # transformers reads these first
        check_pickles(folder, f"{key}.path={model.path}")


def check_pickles(folder: Path, where: str) -> None:
    """Raise ConfigError for weights that were cut short, or that name anything but tensors, which a pickle might execute."""
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            if not zipfile.is_zipfile(file):  # as old versions of torch saved it: found by reading alone
                pickles.read(file)
            foreign = pickles.foreign_names(file) if zipfile.is_zipfile(file) else []
        except Exception as error:  # a damaged pickle leads to anything
            foreign = [line(error)]
        if not foreign:
            continue
        raise ConfigError(
            f"{where}: {file.name} cannot be read as weights: it holds {', '.join(foreign[:3])}; expected tensors alone: get the model from whom "
            "you trust, and save it as safetensors (save_pretrained)"
        )


def size_of(config: Any, key: str) -> ModelSize:
    """Count a model's parameters without making them. Raises ConfigError for a configuration that makes no causal model."""
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a model's own code raises what it likes
        raise ConfigError(
            f"{key}: its config.json makes no causal language model: {line(error)}; expected one that "
            "transformers can build"
        ) from None
    check_causal(model, text, key)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks(model)), default=parameters)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return ModelSize(
        parameters=parameters,
        embedding=model.get_input_embeddings().weight.numel(),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=text.vocab_size,
        largest_block=largest,
        linear_width=sum(m.in_features + m.out_features for m in linear if is_inner_linear(m, text.vocab_size)),
    )


def check_causal(model: torch.nn.Module, text: Any, key: str) -> None:
    """Raise ConfigError for a model whose tokens attend to later ones, as those of BERT and of Gemma's embedding models do."""
    flags = {part.is_causal for part in model.modules() if hasattr(part, "is_causal")}
    if flags != {False}:  # a causal model's attention over images, or to an encoder, is not causal either
        return
    for setting, causal in {"use_bidirectional_attention": None, "is_decoder": True}.items():
        given = getattr(text, setting, None)
        if given is not None and bool(given) is not bool(causal):
            raise ConfigError(
                f"{key}: its {setting}={given} lets tokens attend to later ones, and log-probs and values would depend on what is not "
                f"sampled yet; expected a causal model, or model.override_config.{setting}={json.dumps(causal)} for one that was "
                "trained as such"
            )


def is_inner_linear(module: torch.nn.Module, vocabulary: int) -> bool:
    return isinstance(module, torch.nn.Linear) and module.out_features != vocabulary


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Units that FSDP gathers one at a time: the repeated layers."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [block for entry in lists for block in entry]
