"""Each row's own temperature, top-k and top-p; one uniform number a token, turned into a token by the inverse CDF."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl.rollout.requests import Request


class Sampling:
    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.plain = all(r.temperature == 1 and r.top_p >= 1 and r.top_k <= 0 for r in requests)
        if not self.plain:
            self.greedy = column([request.temperature == 0 for request in requests])
            self.temperature = column([request.temperature or 1.0 for request in requests])
            self.top_p = column([request.top_p for request in requests])
            self.top_k = column([request.top_k if request.top_k > 0 else 2**31 - 1 for request in requests])
            self.truncates = any(request.top_p < 1 or request.top_k > 0 for request in requests)

    def __call__(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        if self.plain:
            log_probs_BV = logits_BV.float().log_softmax(-1)
            tokens_B1 = draw(log_probs_BV, uniforms_B)
        else:
            log_probs_BV = (logits_BV.float() / self.temperature).log_softmax(-1)
            if self.truncates:
                log_probs_BV = self._truncate(log_probs_BV)
            tokens_B1 = draw(log_probs_BV, uniforms_B)
            tokens_B1 = torch.where(self.greedy, logits_BV.argmax(-1, keepdim=True), tokens_B1)
        return tokens_B1[:, 0], log_probs_BV.gather(1, tokens_B1)[:, 0]

    def _truncate(self, log_probs_BV: Tensor) -> Tensor:
        """Keep the k likeliest tokens, and of those the fewest whose mass reaches p; the likeliest always stays."""
        sorted_BV, order_BV = log_probs_BV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
        in_k_BV = rank_V < self.top_k
        probs_BV = sorted_BV.masked_fill(~in_k_BV, -torch.inf).softmax(-1)
        before_BV = cumulative(probs_BV) - probs_BV
        kept_BV = in_k_BV & ((before_BV < self.top_p) | (rank_V == 0))
        truncated_BV = torch.full_like(log_probs_BV, -torch.inf)
        truncated_BV.scatter_(1, order_BV, sorted_BV.masked_fill(~kept_BV, -torch.inf))
        truncated_BV = truncated_BV.log_softmax(-1)
        rows_B1 = ((self.top_p < 1) | (self.top_k < 2**31 - 1)) & ~self.greedy
        return torch.where(rows_B1, truncated_BV, log_probs_BV)


def draw(log_probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens [B, 1] by the inverse CDF, which is summed in double precision."""
    cdf_BV = cumulative(log_probs_BV.exp().double())
    drawn_B1 = torch.searchsorted(cdf_BV, uniforms_B[:, None] * cdf_BV[:, -1:], right=True)
    return drawn_B1.clamp(max=log_probs_BV.shape[-1] - 1)


def cumulative(x_BV: Tensor) -> Tensor:
    """Cumulative sums; on the host where an accelerator's would have to be deterministic, which torch has none of."""
    if x_BV.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x_BV.cumsum(-1)
    return x_BV.cpu().cumsum(-1).to(x_BV.device)
