"""A linear head, log-softmax and entropy in slices of the vocabulary, recomputed in the backward pass.

Memory: a few slices of SLICE_BYTES, whatever the number of tokens or the size of the vocabulary. Differs from verl's
``FusedLinearForPPO`` in that every token has a temperature, logits may be scaled, soft-capped and biased, sums stay in full
precision where the weights are bfloat16, and each row of the head's gradient is written once.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SLICE_BYTES = 16 * 2**20
"""Size of one slice of logits in full precision, on a CPU."""
WHOLE_BYTES = 64 * 2**20
"""Size of logits that are kept whole, on a CPU: they need no second product with the head in the backward pass."""
ON_A_GPU = 16
"""Factor by which both are larger on a GPU, where a slice costs the start of a dozen kernels."""
SLICED_VOCABULARY = 4096
"""Vocabularies above this size are sliced where the logits would be larger than WHOLE_BYTES."""
MIN_SLICE = 256
"""Narrowest slice, however many tokens there are."""


@dataclass(frozen=True)
class Tail:
    """Scaling and soft-capping of a model's logits: y = cap tanh(scale x / cap); an infinite cap stands for y = scale x."""

    scale: float = 1.0
    cap: float = math.inf

    def apply(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap == math.inf else logits.div_(self.cap).tanh_().mul_(self.cap)

    def backward(self, gradient: Tensor, outputs: Tensor) -> Tensor:
        """The logits' gradient from the gradient at ``outputs``; in place, and ``outputs`` are lost."""
        if self.cap != math.inf:
            gradient.mul_(outputs.div_(self.cap).square_().neg_().add_(1))
        return gradient if self.scale == 1 else gradient.mul_(self.scale)

    @staticmethod
    def probe(size: int) -> Tensor:
        """Logits that tell one tail from another: two where a cap saturates, a small one, 1, and a range."""
        few = torch.tensor([1e6, 2e6, 1e-3, 1.0], device="cpu")
        return torch.cat([few, torch.linspace(-100, 100, size - 4, device="cpu")])

    @classmethod
    def from_values(cls, points: Tensor, values: Tensor) -> "Tail | None":
        """The tail that gives these values at the points; None where there is none."""
        if values.shape != points.shape:
            return None
        capped = bool(values[0] == values[1])
        at = 2 if capped else 3
        tail = cls(float(values[at] / points[at]), float(values[0]) if capped else math.inf)
        return tail if torch.allclose(tail.apply(points.clone()), values.float(), rtol=1e-5, atol=1e-5) else None


def may_slice(vocabulary: int) -> bool:
    return vocabulary > SLICED_VOCABULARY


def must_slice(tokens: int, vocabulary: int, device: torch.device) -> bool:
    return may_slice(vocabulary) and 4 * tokens * vocabulary > WHOLE_BYTES * size_on(device)


def size_on(device: torch.device) -> int:
    return 1 if device.type == "cpu" else ON_A_GPU


def sliced_log_probs(
    hidden: Tensor, head: nn.Linear, labels: Tensor, temperature: Tensor, tail: Tail, entropy: bool
) -> Tensor:
    """[N, 1] log-probs of the labels, or [N, 2] with the entropy, from hidden states [N, H]."""
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.to(head.weight.dtype)
        return _SlicedLogProbs.apply(hidden, head.weight, head.bias, labels, temperature[:, None], tail, entropy)


@dataclass
class _Slices:
    """Scores (scaled, capped logits over the temperature) of all tokens, one slice of the vocabulary at a time."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperature: Tensor
    tail: Tail

    def ranges(self) -> list[slice]:
        width = max(MIN_SLICE, SLICE_BYTES * size_on(self.hidden.device) // (4 * len(self.hidden)))
        return [slice(start, start + width) for start in range(0, len(self.weight), width)]

    def scores(self, part: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[part]
        logits = nn.functional.linear(self.hidden, self.weight[part], bias).float()
        return self.tail.apply(logits).div_(self.temperature)

    def labelled(self, part: slice, width: int) -> tuple[Tensor, Tensor]:
        """Tokens whose labels lie in the slice, and where."""
        column = self.labels - part.start
        token = ((column >= 0) & (column < width)).nonzero()[:, 0]
        return token, column[token]

    def logits_gradient(self, gradient: Tensor, scores: Tensor) -> Tensor:
        return self.tail.backward(gradient.div_(self.temperature), scores.mul_(self.temperature)).to(self.hidden.dtype)


class _SlicedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor,
        tail: Tail,
        entropy: bool,
    ) -> Tensor:
        """log p = z - log sum exp z of the label; H = log sum exp z - E[z], with running maximum and sums over slices."""
        slices = _Slices(hidden, weight, bias, labels, temperature, tail)
        label = temperature.new_zeros(len(hidden), 1)
        peak, total, weighted = torch.full_like(label, -1e30), torch.zeros_like(label), torch.zeros_like(label)
        for part in slices.ranges():
            z = slices.scores(part)
            token, column = slices.labelled(part, z.shape[1])
            label[token, 0] = z[token, column]
            higher = torch.maximum(peak, z.amax(-1, keepdim=True))
            shrink = (peak - higher).exp()
            p = z.sub_(higher).exp()
            if entropy:
                weighted = shrink * (weighted + (peak - higher) * total) + z.mul_(p).sum(-1, keepdim=True)
            total = shrink * total + p.sum(-1, keepdim=True)
            peak = higher
        log_sum = peak + total.log()
        columns = [label - log_sum, total.log() - weighted / total][: 1 + entropy]
        ctx.save_for_backward(hidden, weight, bias, labels, temperature, log_sum, columns[-1])
        ctx.tail, ctx.entropy = tail, entropy
        return torch.cat(columns, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """d log p / dz = 1[label] - p;  dH / dz = -p (log p + H)."""
        hidden, weight, bias, labels, temperature, log_sum, entropy = ctx.saved_tensors
        slices = _Slices(hidden, weight, bias, labels, temperature, ctx.tail)
        gradient = gradient.float()
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for part in slices.ranges():
            z = slices.scores(part)
            log_p = z - log_sum
            p = log_p.exp()
            if ctx.entropy:
                dz = log_p.add_(entropy).mul_(gradient[:, 1:]).add_(gradient[:, :1]).mul_(p).neg_()
            else:
                dz = p.mul_(-gradient)
            token, column = slices.labelled(part, z.shape[1])
            dz[token, column] += gradient[token, 0]
            d_logits = slices.logits_gradient(dz, z)
            if d_hidden is not None:
                d_hidden += d_logits @ weight[part]
            if d_weight is not None:
                torch.mm(d_logits.T, hidden, out=d_weight[part])
            if d_bias is not None:
                d_bias[part] = d_logits.sum(0)
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None
