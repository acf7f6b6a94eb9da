"""A forward pass for decoding with Llama-like models: transformers' operations in their order, in fewer calls.

A token of a small model costs a CPU more in calls of modules and kernels than in arithmetic. Scores are those of the
model's own forward pass, bit for bit on a CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.cache_utils import Cache

from marl.rollout.masks import window_of

LIKE_LLAMA = (LlamaForCausalLM, Qwen2ForCausalLM)
"""Models whose layers are an RMS norm, attention with rotary positions, an RMS norm and a gated MLP."""
Place = tuple[Tensor, Tensor]
"""Rows [P] and columns [P] of tokens."""
Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines of positions [B, N, 1, D]."""


class OwnForward:
    """A model's own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self, ids_BN: Tensor, mask_B1NW: Any, positions_BN: Tensor, cache: Cache, last: Place | None = None
    ) -> Tensor:
        """Scores [B, N, V] of what follows each token; [P, 1, V] where only what follows ``last`` is wanted. The mask may be one a
        kind of layer, by its name."""
        with picked(self.model.get_output_embeddings(), last) if last else nullcontext():
            output = self.model(
                input_ids=ids_BN,
                attention_mask=mask_B1NW,
                position_ids=positions_BN,
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = output.logits
        return logits


@contextmanager
def picked(head: nn.Module, place: Place) -> Iterator[None]:
    """Reduce a head's input to some tokens."""
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][place][:, None], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


class PlainForward(OwnForward):
    """The same of a model that is like Llama; its last layer goes on with the ``last`` tokens alone."""

    def __call__(
        self, ids_BN: Tensor, mask_B1NW: Any, positions_BN: Tensor, cache: Cache, last: Place | None = None
    ) -> Tensor:
        decoder = self.model.model
        x_BNH = decoder.embed_tokens(ids_BN)
        angles = signed(*decoder.rotary_emb(x_BNH, positions_BN))
        attend = partial(AttentionInterface()[self.model.config._attn_implementation], attention_mask=mask_B1NW)
        *layers, final = decoder.layers
        for layer in layers:
            x_BNH = passed(layer, x_BNH, angles, cache, attend)
        if last:
            attend = partial(attend, attention_mask=mask_B1NW[last[0], :, last[1]][:, :, None])
        x_BNH = passed(final, x_BNH, angles, cache, attend, last)
        logits: Tensor = self.model.get_output_embeddings()(normed(decoder.norm, x_BNH))
        return logits


def forward_of(model: PreTrainedModel) -> OwnForward:
    """The plain pass where all projections are plain layers and all layers see all tokens: a projection that PEFT or a quantiser
    replaced computes more than its weight."""
    if type(model) not in LIKE_LLAMA or window_of(model.config) is not None:
        return OwnForward(model)
    projections = (part for name, part in model.named_modules() if name.endswith("_proj"))
    return (PlainForward if all(type(part) is nn.Linear for part in projections) else OwnForward)(model)


def passed(
    layer: Any, x_BNH: Tensor, angles: Angles, cache: Cache, attend: Callable[..., Any], last: Place | None = None
) -> Tensor:
    """Output of a layer, at the ``last`` tokens or at all."""
    module = layer.self_attn
    query, key, value = projected(module, normed(layer.input_layernorm, x_BNH), angles)
    keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), module.layer_idx)
    if last:
        x_BNH, query, keys, values = x_BNH[last][:, None], query[last][:, None], keys[last[0]], values[last[0]]
    output, _ = attend(module, query.transpose(1, 2), keys, values, scaling=module.scaling)
    x_BNH = x_BNH + linear(module.o_proj, output.reshape(*x_BNH.shape[:2], -1))
    return x_BNH + gated(layer.mlp, normed(layer.post_attention_layernorm, x_BNH))


def projected(module: Any, x_BNH: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, N, heads, D], the former two at their positions."""
    shape = (*x_BNH.shape[:2], -1, module.head_dim)
    query, key, value = (linear(part, x_BNH).view(shape) for part in (module.q_proj, module.k_proj, module.v_proj))
    query, key = rotated(torch.cat([query, key], 2), *angles).split([query.shape[2], key.shape[2]], 2)
    return query, key, value


def signed(cos_BND: Tensor, sin_BND: Tensor) -> Angles:
    """Angles for all heads; the sines are negative where rotation would negate a number."""
    half = sin_BND.shape[-1] // 2
    return cos_BND[:, :, None], torch.cat([-sin_BND[..., :half], sin_BND[..., half:]], -1)[:, :, None]


def rotated(x_BNAD: Tensor, cos_BN1D: Tensor, sin_BN1D: Tensor) -> Tensor:
    return (x_BNAD * cos_BN1D).add_(x_BNAD.roll(x_BNAD.shape[-1] // 2, -1).mul_(sin_BN1D))


def normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon) if x.dtype == torch.float32 else norm(x)


def gated(mlp: Any, x: Tensor) -> Tensor:
    return linear(mlp.down_proj, mlp.act_fn(linear(mlp.gate_proj, x)).mul_(linear(mlp.up_proj, x)))


def linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)
