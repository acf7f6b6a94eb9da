"""A forward pass for decoding with Llama-like models: transformers' operations in their order, in fewer calls.

A token of a small model costs a CPU more in calls of modules and kernels than in arithmetic. Scores are those of the
model's own forward pass, bit for bit on a CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from marl.rollout.masks import window_of
from marl.rollout.slots import Slots

LIKE_LLAMA = (LlamaForCausalLM, Qwen2ForCausalLM)
"""Models whose layers are an RMS norm, attention with rotary positions, an RMS norm and a gated MLP."""
Place = tuple[Tensor, Tensor]
"""Rows [P] and columns [P] of tokens."""
Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines of positions [B, N, 1, D]; [N, D] in a table."""


class OwnForward:
    """A model's own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self, ids_BN: Tensor, mask_B1NW: Any, positions_BN: Tensor, cache: Slots, last: Place | None = None
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

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        decoder = model.model
        self.layers, self.rotary = [parts_of(layer) for layer in decoder.layers], Rotary(decoder.rotary_emb)
        self.embedding, self.norm = decoder.embed_tokens, norm_of(decoder.norm)
        self.attend = AttentionInterface()[model.config._attn_implementation]

    def __call__(
        self, ids_BN: Tensor, mask_B1NW: Any, positions_BN: Tensor, cache: Slots, last: Place | None = None
    ) -> Tensor:
        x_BNH = self.embedding(ids_BN)
        angles = self.rotary(x_BNH, positions_BN, cache.capacity)
        attend = partial(self.attend, attention_mask=mask_B1NW)
        *layers, final = self.layers
        for layer in layers:
            x_BNH = passed(layer, x_BNH, angles, cache, attend)
        if last:
            attend = partial(attend, attention_mask=mask_B1NW[last[0], :, last[1]][:, :, None])
        x_BNH = passed(final, x_BNH, angles, cache, attend, last)
        logits: Tensor = self.model.get_output_embeddings()(
            normed(self.norm, x_BNH)
        )  # a joint decoder may have replaced it
        return logits


Product = tuple[Tensor, Tensor | None]
"""Weight and bias. A sync, or a move to another device, changes what a parameter holds and not which one it is."""


class Norm(NamedTuple):
    module: Any
    weight: Tensor
    epsilon: float


class Parts(NamedTuple):
    """A layer's modules and parameters: to look each of them up costs as much as a small kernel."""

    attention: Any
    first_norm: Norm
    projections: tuple[Product, Product, Product]
    """Projections of queries, keys and values."""
    output: Product
    second_norm: Norm
    gate: Product
    up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]


def parts_of(layer: Any) -> Parts:
    module, mlp = layer.self_attn, layer.mlp
    return Parts(
        attention=module,
        first_norm=norm_of(layer.input_layernorm),
        projections=(product(module.q_proj), product(module.k_proj), product(module.v_proj)),
        output=product(module.o_proj),
        second_norm=norm_of(layer.post_attention_layernorm),
        gate=product(mlp.gate_proj),
        up=product(mlp.up_proj),
        down=product(mlp.down_proj),
        activation=mlp.act_fn.forward,
    )


def product(layer: nn.Linear) -> Product:
    return layer.weight, layer.bias


def norm_of(module: Any) -> Norm:
    return Norm(module, module.weight, module.variance_epsilon)


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary kinds whose angles depend on the longest position of a batch."""


class Rotary:
    """Angles of positions, computed once for all that fit into a cache."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.table_ND: Angles | None = None
        self.is_fixed = module.rope_type not in LENGTH_DEPENDENT

    def __call__(self, x_BNH: Tensor, positions_BN: Tensor, capacity: int) -> Angles:
        if not self.is_fixed:
            return signed(*self.module(x_BNH, positions_BN))
        cos_ND, sin_ND = self._table(x_BNH, capacity)
        places, shape = positions_BN.flatten(), (*positions_BN.shape, 1, cos_ND.shape[-1])
        return cos_ND.index_select(0, places).view(shape), sin_ND.index_select(0, places).view(shape)

    def _table(self, like: Tensor, capacity: int) -> Angles:
        table = self.table_ND
        if table is None or len(table[0]) < capacity or table[0].device != like.device:
            positions_1N = torch.arange(1 << (capacity - 1).bit_length(), device=like.device)[None]
            cos_1N1D, sin_1N1D = signed(*self.module(like, positions_1N))
            self.table_ND = table = cos_1N1D[0, :, 0], sin_1N1D[0, :, 0]
        return table


def forward_of(model: PreTrainedModel) -> OwnForward:
    """The plain pass where all projections are plain layers and all layers see all tokens: a projection that PEFT or a quantiser
    replaced computes more than its weight."""
    if type(model) not in LIKE_LLAMA or window_of(model.config) is not None:
        return OwnForward(model)
    projections = (part for name, part in model.named_modules() if name.endswith("_proj"))
    return (PlainForward if all(type(part) is nn.Linear for part in projections) else OwnForward)(model)


def passed(
    layer: Parts, x_BNH: Tensor, angles: Angles, cache: Slots, attend: Callable[..., Any], last: Place | None = None
) -> Tensor:
    """Output of a layer, at the ``last`` tokens or at all."""
    module = layer.attention
    query, key, value = projected(layer, normed(layer.first_norm, x_BNH), angles)
    keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), module.layer_idx)
    if last:
        x_BNH, query, keys, values = x_BNH[last][:, None], query[last][:, None], keys[last[0]], values[last[0]]
    output, _ = attend(module, query.transpose(1, 2), keys, values, scaling=module.scaling)
    x_BNH = x_BNH + F.linear(output.reshape(*x_BNH.shape[:2], -1), *layer.output)
    return x_BNH + gated(layer, normed(layer.second_norm, x_BNH))


def projected(layer: Parts, x_BNH: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, N, heads, D], the former two at their positions."""
    shape = (*x_BNH.shape[:2], -1, layer.attention.head_dim)
    query, key, value = (F.linear(x_BNH, *part).view(shape) for part in layer.projections)
    query, key = rotated(torch.cat([query, key], 2), *angles).split([query.shape[2], key.shape[2]], 2)
    return query, key, value


def signed(cos_BND: Tensor, sin_BND: Tensor) -> Angles:
    """Angles for all heads; the sines are negative where rotation would negate a number."""
    half = sin_BND.shape[-1] // 2
    return cos_BND[:, :, None], torch.cat([-sin_BND[..., :half], sin_BND[..., half:]], -1)[:, :, None]


def rotated(x_BNAD: Tensor, cos_BN1D: Tensor, sin_BN1D: Tensor) -> Tensor:
    return (x_BNAD * cos_BN1D).add_(x_BNAD.roll(x_BNAD.shape[-1] // 2, -1).mul_(sin_BN1D))


def normed(norm: Norm, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        output: Tensor = norm.module(x)
        return output
    return torch.rms_norm(x, norm.weight.shape, norm.weight, norm.epsilon)


def gated(layer: Parts, x: Tensor) -> Tensor:
    return F.linear(layer.activation(F.linear(x, *layer.gate)).mul_(F.linear(x, *layer.up)), *layer.down)
