"""The model of an ``hf`` server: the trainer's module with an attention that decodes."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from marl.rollout.attention import ATTENTION
from marl.rollout.masks import kinds_of, other_attention, window_of
from marl.rollout.plain_forward import LENGTH_DEPENDENT

ORIGINAL = "original_max_position_embeddings"
VECTOR = 32
"""Numbers that torch computes an activation function of at once; the rest of a tensor it computes one by one, with other last bits."""


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
    """The configuration at ``path``, with our attention. Raises ValueError for one that ours does not compute."""
    changes = dict(model_config["override_config"] or {}) | {"attn_implementation": attention}
    config = AutoConfig.from_pretrained(path, trust_remote_code=model_config["trust_remote_code"], **changes)
    check_attention(config, path)
    return config


def check_attention(config: Any, path: str) -> None:
    """Raise ValueError for a model whose attention is not transformers' sdpa, which ours repeats."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)  # None: the model's own code
    other = other_attention(config)
    if other is None and kind is not None and not (kind._supports_sdpa and takes_any_attention(kind)):
        other = f"an attention of its own (model_type={config.model_type})"
    if other is None and kind is not None and "position_ids" not in inspect.signature(kind.forward).parameters:
        other = f"positions of its own (model_type={config.model_type})"
    if other is not None:
        raise ValueError(
            f"rollout.name=hf computes full attention and sliding windows; {path} has {other}: use vllm or sglang"
        )
    if window_of(config) is not None and not kinds_of(config.get_text_config()) and not reads_window(kind):
        raise ValueError(
            f"{path} has sliding_window={window_of(config)}, and its model is not known to apply it: rollout.name=hf would hide "
            "tokens that the trainer reads; set model.override_config.sliding_window=null, or use vllm or sglang"
        )


def check_positions(config: Any, path: str, longest: int) -> None:
    """Raise ValueError if a conversation may grow beyond the length at which the model's rotary angles change: cached keys would no
    longer match."""
    text = config.get_text_config()
    for kind, limit in length_dependent(text):
        if longest > limit:
            raise ValueError(
                f"{path} has rope_type={kind}, whose angles change beyond {limit} tokens, and conversations may grow to "
                f"{longest}: rollout.name=hf reuses the keys of earlier tokens; set rollout.max_model_len={limit}, or use vllm or sglang"
            )


def length_dependent(text: Any) -> Iterator[tuple[str, int]]:
    """Rotary kinds of a model whose angles depend on the length, each with the length up to which they stay the same."""
    given = getattr(text, "rope_parameters", None) or {}
    for rope in given.values() if all(isinstance(value, Mapping) for value in given.values()) else [given]:
        kind = rope.get("rope_type")
        if kind in LENGTH_DEPENDENT:
            original = (rope.get(ORIGINAL) or getattr(text, ORIGINAL, None)) if kind == "longrope" else None
            yield kind, original or text.max_position_embeddings


def longest_of(rollout: Any, config: Any) -> int:
    """The most tokens a conversation may have, answer included."""
    longest: int = rollout.max_model_len or config.get_text_config().max_position_embeddings
    return longest


def inexact_on_cpu(config: Any, threads: int) -> list[str]:
    """Why the last bits of an answer may depend on the rows beside it."""
    width = getattr(config.get_text_config(), "intermediate_size", None)
    found = []
    if threads > 2:
        found.append(f"{threads} threads share a tensor's numbers in uneven parts; expected OMP_NUM_THREADS=2 or 1")
    if isinstance(width, int) and width % VECTOR:
        found.append(
            f"intermediate_size={width}: the last of its activations are computed otherwise; expected a multiple of {VECTOR}"
        )
    return found


def takes_any_attention(kind: type) -> bool:
    """False for models such as Falcon, whose code has one class per known attention and none for ours."""
    own = [value for name, value in vars(sys.modules[kind.__module__]).items() if name.endswith("ATTENTION_CLASSES")]
    return all(ATTENTION in classes for classes in own)


def reads_window(kind: type | None) -> bool:
    """True if a model class of transformers masks by its configuration's ``sliding_window``, as Mistral's does and Llama's not."""
    return kind is not None and hasattr(sys.modules[kind.__module__], "create_sliding_window_causal_mask")
