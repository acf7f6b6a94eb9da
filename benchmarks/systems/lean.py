"""Qwen2 in plain torch: a static cache for decoding, and a forward pass for training. The floor is built from it."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST = 1024
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Lean(nn.Module):
    """Fused projections, and rotary tables that are computed once."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.hidden, self.eps = config["hidden_size"], config["rms_norm_eps"]
        self.head_dim = self.hidden // self.heads

        def parameter(*names: str) -> nn.Parameter:
            return nn.Parameter(torch.cat([weights[name] for name in names]).to(dtype).clone())

        def layers(*names: str) -> nn.ParameterList:
            prefixes = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
            return nn.ParameterList([parameter(*(f"{prefix}.{name}" for name in names)) for prefix in prefixes])

        self.embedding, self.norm = parameter("model.embed_tokens.weight"), parameter("model.norm.weight")
        self.head = parameter("lm_head.weight")
        self.norm_in, self.norm_mid = layers("input_layernorm.weight"), layers("post_attention_layernorm.weight")
        self.qkv = layers(*(f"self_attn.{x}_proj.weight" for x in "qkv"))
        self.qkv_bias = layers(*(f"self_attn.{x}_proj.bias" for x in "qkv"))
        self.out = layers("self_attn.o_proj.weight")
        self.gate_up, self.down = layers("mlp.gate_proj.weight", "mlp.up_proj.weight"), layers("mlp.down_proj.weight")
        self._rotary(config, dtype)

    def _rotary(self, config: dict, dtype: torch.dtype) -> None:
        base = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        frequencies = 1.0 / base ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.outer(torch.arange(LONGEST).float(), frequencies).repeat(1, 2)
        sign = torch.ones(self.head_dim)
        sign[: self.head_dim // 2] = -1
        self.cos, self.sin = (table.to(dtype)[None, :, None] for table in (angles.cos(), angles.sin() * sign))

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotary positions from ``start`` on, of [B, T, heads, dim]."""
        span = slice(start, start + x.shape[1])
        return x * self.cos[:, span] + torch.roll(x, self.head_dim // 2, -1) * self.sin[:, span]

    def layer(self, i: int, x: Tensor, start: int, attend: Attention) -> Tensor:
        batch, length, _ = x.shape
        h = F.rms_norm(x, (self.hidden,), self.norm_in[i], self.eps)
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = F.linear(h, self.qkv[i], self.qkv_bias[i]).split(sizes, -1)
        q, k, v = (part.view(batch, length, -1, self.head_dim) for part in parts)
        q, k = self.rotate(q, start), self.rotate(k, start)
        attended = attend(i, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, self.hidden), self.out[i])
        gate, up = F.linear(F.rms_norm(x, (self.hidden,), self.norm_mid[i], self.eps), self.gate_up[i]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down[i])

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (self.hidden,), self.norm, self.eps), self.head)

    def forward(self, ids_BT: Tensor, keep_from: int = 0) -> Tensor:
        """Logits from position ``keep_from`` on."""

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        x = F.embedding(ids_BT, self.embedding)
        for i in range(len(self.qkv)):
            x = self.layer(i, x, 0, attend)
        return self.logits(x[:, keep_from:])

    def new_cache(self, batch: int, length: int) -> Tensor:
        """Zeros [layer, key or value, B, heads, T, dim]."""
        shape = (len(self.qkv), 2, batch, self.kv_heads, length, self.head_dim)
        return torch.zeros(shape, dtype=self.embedding.dtype)

    def extend(self, ids_BT: Tensor, cache: Tensor, start: int) -> Tensor:
        """Append tokens to the cache at ``start``; returns the logits [B, V] of the next one."""
        batch, length = ids_BT.shape
        end = start + length
        mask = torch.ones(length, end, dtype=torch.bool).tril(start) if start and length > 1 else None

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache[i, 0, :, :, start:end], cache[i, 1, :, :, start:end] = k, v
            if length > 1:
                keys, values = (k, v) if not start else (cache[i, 0, :, :, :end], cache[i, 1, :, :, :end])
                return F.scaled_dot_product_attention(
                    q, keys, values, attn_mask=mask, is_causal=not start, enable_gqa=True
                )
            # the query heads of one key head as query rows: nothing is copied
            grouped = q.reshape(batch, self.kv_heads, -1, self.head_dim)
            attended = F.scaled_dot_product_attention(grouped, cache[i, 0, :, :, :end], cache[i, 1, :, :, :end])
            return attended.view(batch, self.heads, 1, self.head_dim)

        x = F.embedding(ids_BT, self.embedding)
        for i in range(len(self.qkv)):
            x = self.layer(i, x, start, attend)
        return self.logits(x[:, -1])


def sample(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] at temperature 1 and their log-probs, by the exponential race."""
    log_probs_BV = logits_BV.float().log_softmax(-1)
    tokens_B = (log_probs_BV.exp() / torch.empty_like(log_probs_BV).exponential_()).argmax(-1)
    return tokens_B, log_probs_BV.gather(-1, tokens_B[:, None])[:, 0]


def decode(model: Lean, logits_BV: Tensor, cache: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, length] after a prefilled prompt, and their log-probs."""
    tokens_BT = torch.empty(len(logits_BV), length, dtype=torch.long)
    log_probs_BT = torch.empty(len(logits_BV), length)
    for t in range(length):
        tokens_BT[:, t], log_probs_BT[:, t] = sample(logits_BV)
        if t < length - 1:
            logits_BV = model.extend(tokens_BT[:, t : t + 1], cache, start + t)
    return tokens_BT, log_probs_BT


def prefill_once(model: Lean, prompts_NP: Tensor, copies: int, length: int) -> tuple[Tensor, Tensor]:
    """Read every prompt once; returns logits and a cache of ``length`` positions, ``copies`` rows to a prompt."""
    count, width = prompts_NP.shape
    read = model.new_cache(count, width)
    logits_NV = model.extend(prompts_NP, read, 0)
    cache = model.new_cache(count * copies, length)
    cache[..., :width, :] = read.repeat_interleave(copies, 2)
    return logits_NV.repeat_interleave(copies, 0), cache


def log_probs_of(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return logits_BTV.float().log_softmax(-1).gather(-1, tokens_BT[..., None])[..., 0]
