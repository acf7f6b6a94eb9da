"""The state that a mixer reads, learned with it from the ids of the joint observation."""

import torch
from torch import Tensor, nn

PRIMES = (1_000_003, 998_244_353)
"""Multipliers of the hash: a token and the one before it are not interchangeable."""


class StateEncoder(nn.Module):
    """Ragged ids [B, T] to states [B, S]: the mean embedding of tokens and of pairs of neighbours, hashed into ``buckets``.

    Small and without a vocabulary: it stands beside the driver, whatever tokenizer the critics have. No ids give one and
    the same state.
    """

    def __init__(self, state_dim: int, buckets: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.embed = nn.EmbeddingBag(2 * buckets, state_dim, mode="mean")
        self.norm = nn.LayerNorm(state_dim)

    def forward(self, ids_BT: Tensor) -> Tensor:
        flat, offsets = ids_BT.values(), ids_BT.offsets()  # type: ignore[attr-defined]
        before = torch.cat([flat.new_full((1,), -1), flat[:-1]])[: len(flat)]
        starts = offsets[:-1]
        before[starts[starts < len(flat)]] = -1
        single = flat * PRIMES[0] % self.buckets
        pair = self.buckets + (before * PRIMES[1] + flat * PRIMES[0]) % self.buckets
        mixed = torch.stack([single, pair], 1).flatten()
        return self.norm(self.embed(mixed, 2 * starts))
