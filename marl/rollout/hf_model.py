"""The model of an ``hf`` server: the trainer's module with an attention that decodes."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from marl.rollout.attention import ATTENTION


def build_model(model_config: Any, dtype: torch.dtype, device: str, attention: str = ATTENTION) -> PreTrainedModel:
    """The trainer's module, with weights yet to come."""
    config = decodable_config(model_config, model_config["path"], attention)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=model_config["trust_remote_code"])
    return model.to(device).eval()


def load_model(model_config: Any, dtype: torch.dtype, device: str, attention: str = ATTENTION) -> PreTrainedModel:
    """The model at ``path`` with its weights. Raises ValueError where some are missing, which would be random numbers."""
    path = model_config["path"]
    model, loaded = AutoModelForCausalLM.from_pretrained(
        path,
        config=decodable_config(model_config, path, attention),
        dtype=dtype,
        trust_remote_code=model_config["trust_remote_code"],
        output_loading_info=True,
    )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ValueError(
            f"the weights at {path} lack {len(missing)} parameters, such as {missing[0]}; use a whole model"
        )
    return model.to(device).eval()


def decodable_config(model_config: Any, path: str, attention: str = ATTENTION) -> Any:
    """The configuration at ``path``, with our attention. Raises ValueError for one that the decoding loop does not mask."""
    changes = dict(model_config["override_config"] or {}) | {"attn_implementation": attention}
    config = AutoConfig.from_pretrained(path, trust_remote_code=model_config["trust_remote_code"], **changes)
    if other := other_attention(config):
        raise ValueError(f"rollout.name=hf masks full attention only; {path} has {other}: use vllm or sglang")
    return config


def other_attention(config: Any) -> str | None:
    """A model's attention that is not full, by its layers' kinds or by one window for all of them (Mistral's, Phi-3's)."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if kinds:
        return next((f"{kind} layers" for kind in kinds if kind != "full_attention"), None)
    return f"a sliding_window of {window}" if window and window < config.max_position_embeddings else None
