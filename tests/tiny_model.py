"""A model small enough to decode in a unit test, and its answers."""

from contextlib import contextmanager

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

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
