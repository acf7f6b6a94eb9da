"""Attention of the hf server's models: transformers' sdpa, but for single queries."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from marl.platform.shapes import MIN_ROWS

ATTENTION, NEAR_ATTENTION = "marl_sdpa", "marl_sdpa_near"


def heads_as_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    least: int = MIN_ROWS,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """sdpa, but of a single query the heads that share a key head are its rows: the cache is read as it lies, not repeated
    for each of them. On a CPU they are asked until there are ``least``."""
    if query.shape[2] > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, _, size = query.shape
    shared = heads // key.shape[1]
    rows = query.reshape(batch, -1, shared, size)
    if query.device.type == "cpu" and shared < least:
        rows = rows.repeat(1, 1, -(-least // shared), 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output[:, :, :shared].reshape(batch, 1, heads, -1), None


AttentionInterface.register(ATTENTION, heads_as_rows)
AttentionInterface.register(NEAR_ATTENTION, partial(heads_as_rows, least=1))
