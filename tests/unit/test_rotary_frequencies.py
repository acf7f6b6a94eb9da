"""Rotary frequencies of a base in half precision: verl casts them with the weights, and they are computed anew."""

import pytest
import torch

from marl.platform.adapters import renew_frequencies
from tests.tiny_model import windowed_model


def frequencies(model):
    return {key: buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")}


@pytest.mark.parametrize(("family", "kinds"), [("qwen2", 1), ("mistral", 1), ("gemma3", 2)])
def test_frequencies_are_in_full_precision_whatever_the_base_is_in(family, kinds):
    """Gemma 3 has some for every kind of its layers."""
    full, half = frequencies(windowed_model(family)), windowed_model(family).to(torch.bfloat16)
    assert len(full) == 2 * kinds
    for key, rounded in frequencies(half).items():
        assert rounded.dtype == torch.bfloat16 and not torch.equal(rounded.float(), full[key])
    renew_frequencies(half)
    for key, renewed in frequencies(half).items():
        assert renewed.dtype == torch.float32 and torch.equal(renewed, full[key])
    assert next(half.parameters()).dtype == torch.bfloat16
