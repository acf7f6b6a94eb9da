"""Loading of a model's configuration and tokenizer from its folder or hub id, for checks before the start."""

from typing import Any

from transformers import AutoConfig, GenerationConfig
from verl.utils import hf_tokenizer

from marl.config.errors import ConfigError, line

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def load_config(model: Any, key: str) -> Any:
    """The Hugging Face configuration of ``<key>.path``. Raises ConfigError where there is none."""
    changes = dict(model.override_config)
    changes.pop("attn_implementation", None)  # the workers' machine may have what this one lacks
    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **changes)
    except Exception as error:  # transformers raises whatever a broken file leads it to
        raise ConfigError(
            f"{key}.path={model.path}: its config.json cannot be used: {line(error)}; expected a Hugging Face model, "
            f"here or on the hub{about_its_code(error, key)}"
        ) from None


def load_generation_config(path: str) -> GenerationConfig | None:
    """A model's ``generation_config.json``, whose end tokens servers obey; None where it has none."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def load_tokenizer(model: Any, key: str) -> Any:
    """The tokenizer as the servers and clients will use it. Raises ConfigError where it cannot be loaded."""
    named = "tokenizer_path" if model.tokenizer_path else "path"
    try:
        tokenizer = hf_tokenizer(model[named], trust_remote_code=model.trust_remote_code)
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(
            f"{key}.{named}={model[named]}: its tokenizer cannot be loaded: {line(error)}; expected tokenizer.json or the "
            f"like; set {key}.tokenizer_path if it lies elsewhere{about_its_code(error, key)}"
        ) from None
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def about_its_code(error: BaseException, key: str) -> str:
    """The remedy where transformers refuses to execute code that comes with a model."""
    if "trust_remote_code" not in str(error):
        return ""
    return f"; its own code is not executed: read it, and set {key}.trust_remote_code=true if you trust it"
