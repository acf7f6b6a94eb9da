"""Attention of the hf server's models: transformers' sdpa, but for single queries."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from marl.platform.shapes import MIN_ROWS

ATTENTION = "marl_sdpa"


def heads_as_rows(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """sdpa, but of a single query the heads that share a key head are its rows: the cache is read as it lies, not repeated
    for each of them. On a CPU they are asked until there are ``MIN_ROWS``."""
    if query.shape[2] > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, _, size = query.shape
    shared = heads // key.shape[1]
    rows = query.reshape(batch, -1, shared, size)
    if query.device.type == "cpu" and shared < MIN_ROWS:
        rows = rows.repeat(1, 1, -(-MIN_ROWS // shared), 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output[:, :, :shared].reshape(batch, 1, heads, -1), None


AttentionInterface.register(ATTENTION, heads_as_rows)
