"""A model small enough to decode in a unit test, and its answers."""

from contextlib import contextmanager

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from marl.rollout.decoding import ATTENTION, decode

EOS = 7


def make_model(layers=2, hidden=64):
    torch.manual_seed(0)
    config = Qwen2Config(
        attn_implementation=ATTENTION,
        vocab_size=120,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3 if "embed" in name else 0.15)
    return model


WINDOW = 8
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def windowed_config(family: str, **sizes) -> PretrainedConfig:
    """A small model whose layers, all or some, see the latest ``WINDOW`` tokens."""
    shape = {
        "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 2048, "sliding_window": WINDOW, "eos_token_id": EOS,
        "pad_token_id": 0, "bos_token_id": None,
    } | sizes  # fmt: skip
    if family == "mistral":
        return MistralConfig(**shape)
    if family == "qwen2":
        return Qwen2Config(**shape, use_sliding_window=True, layer_types=KINDS)
    return Gemma3TextConfig(**shape, head_dim=8, query_pre_attn_scalar=8, layer_types=KINDS)


def windowed_model(family: str, attention: str = ATTENTION, **sizes) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(windowed_config(family, **sizes), attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    return model


def text_of(ids):
    return " ".join(map(str, ids))


def answers(model, batch):
    return [(a.token_ids, a.log_probs, a.stop_reason) for a in decode(model, batch, 0, text_of)]


@contextmanager
def shapes_read(model):
    """The shapes of the ids that a model reads meanwhile."""
    seen = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    try:
        yield seen
    finally:
        hook.remove()
