"""Attention masks of the hf server's models: of full attention, and of layers that see a window of the latest tokens."""

from typing import Any

import torch
from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"


def window_of(config: Any) -> int | None:
    """Tokens that a layer with a sliding window sees, itself included; None where every layer sees all."""
    text = config.get_text_config()
    kinds = kinds_of(text)
    return getattr(text, "sliding_window", None) if not kinds or SLIDING in kinds else None


def other_attention(config: Any) -> str | None:
    """The first attention feature besides full and sliding-window layers; None if there is none."""
    text = config.get_text_config()
    strange = [kind for kind in kinds_of(text) if kind not in (FULL, SLIDING)]
    if strange:
        return f"{strange[0]} layers"
    if getattr(text, "attn_logit_softcapping", None):
        return f"attn_logit_softcapping={text.attn_logit_softcapping:g}"
    return "layers that share keys and values" if getattr(text, "num_kv_shared_layers", 0) else None


def kinds_of(text: Any) -> set[str]:
    """Kinds of a model's layers; none where its configuration does not tell them apart."""
    return set(getattr(text, "layer_types", None) or ())


class Masks:
    """Masks for one model. Layers with a window keep all their keys and values, and are shown the latest alone."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.window, self.dtype = window_of(config), dtype
        self.is_mixed = len(kinds_of(config.get_text_config())) > 1

    def __call__(self, positions_BN: Tensor, width: int) -> Any:
        """[B, 1, N, W] for tokens at these positions over so many keys; one a kind of layer, by its name, if kinds differ."""
        keys_W, at_BN1 = torch.arange(width, device=positions_BN.device), positions_BN[..., None]
        later_BNW = keys_W > at_BN1
        if self.window is None:
            return self._hiding(later_BNW)
        windowed = self._hiding(later_BNW | (keys_W <= at_BN1 - self.window))
        return {FULL: self._hiding(later_BNW), SLIDING: windowed} if self.is_mixed else windowed

    def _hiding(self, unseen_BNW: Tensor) -> Tensor:
        mask_BNW = torch.zeros(unseen_BNW.shape, dtype=self.dtype, device=unseen_BNW.device)
        return mask_BNW.masked_fill_(unseen_BNW, -torch.inf)[:, None]
