"""Attention of the hf server's models: transformers' sdpa, but for single queries."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
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
    """sdpa that reads the cache as it lies, without repeating it for the heads that share a key head: for a single query
    these heads are rows, for several a CPU's kernel shares the keys itself. On a CPU a single query has at least ``least``
    rows."""
    on_cpu, single = query.device.type == "cpu", query.shape[2] == 1
    if attention_mask is None or not (single or on_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    attend = partial(scaled_dot_product_attention, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    if not single:
        return attend(query, key, value, enable_gqa=True).transpose(1, 2), None
    batch, heads, _, size = query.shape
    shared = heads // key.shape[1]
    rows = query.reshape(batch, -1, shared, size)
    if on_cpu and shared < least:
        rows = extended(rows, least)
    return attend(rows, key, value)[:, :, :shared].reshape(batch, 1, heads, -1), None


def extended(rows_BKSD: Tensor, least: int) -> Tensor:
    """The rows of each key head, and ``least`` in all with those that follow them in memory: their contents are irrelevant.
    Copies where memory ends before."""
    batch, heads, shared, size = rows_BKSD.shape
    strides = rows_BKSD.stride()
    last = sum((count - 1) * stride for count, stride in zip((batch, heads, least, size), strides, strict=True))
    if rows_BKSD.storage_offset() + last < rows_BKSD.untyped_storage().nbytes() // rows_BKSD.element_size():
        return rows_BKSD.as_strided((batch, heads, least, size), strides)
    return rows_BKSD.repeat(1, 1, -(-least // shared), 1)


AttentionInterface.register(ATTENTION, heads_as_rows)
AttentionInterface.register(NEAR_ATTENTION, partial(heads_as_rows, least=1))
