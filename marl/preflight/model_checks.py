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
    folder, where = Path(model.path), f"{key}.path={model.path}"
    if not folder.is_dir():
        return
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"{where}: there are no weights; expected one of {', '.join(WEIGHTS)}")
    tensors = [file for file in files if file.suffix == ".safetensors"]
    if not tensors:  # transformers reads these first
        return check_pickles(folder, where)
    file = folder / INDEX
    try:
        named = json.loads(file.read_text())["weight_map"].values() if file.is_file() else ()
        for file in dict.fromkeys([*tensors, *(folder / name for name in named)]):
            with safe_open(file, "pt"):
                pass
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {file.name} cannot be read: {line(error)}; expected whole safetensors, save or download the model again"
        ) from None


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
            f"{where}: {file.name} cannot be read as weights: it holds {', '.join(foreign[:3])}; expected tensors alone: get the model "
            "from a source that you trust, and save it as safetensors (save_pretrained)"
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
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [sum(p.numel() for p in block.parameters()) for repeated in lists for block in repeated]
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inner = [module for module in linear if module.out_features != text.vocab_size]
    return ModelSize(
        parameters=parameters,
        embedding=model.get_input_embeddings().weight.numel(),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=text.vocab_size,
        largest_block=max(blocks, default=parameters),
        linear_width=sum(module.in_features + module.out_features for module in inner),
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
