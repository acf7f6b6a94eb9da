"""The MLP of a model's last layer at the positions that are read: no later layer attends to what it gives elsewhere."""

from typing import Any

from torch import Tensor, nn

GATED = {"gate_proj", "up_proj", "down_proj"}
"""Projections of a gated MLP, which computes every position on its own."""


class SelectiveMLP:
    """Makes the last MLP of a forward pass compute some positions alone, and gives zeros at all others.

    The positions stay until the next forward pass: with gradient checkpointing, the backward pass computes the layer again.
    """

    def __init__(self, mlp: nn.Module) -> None:
        self.select(None)
        mlp.register_forward_pre_hook(self._narrow)
        mlp.register_forward_hook(self._widen)

    def select(self, index: Tensor | None, count: int = 0) -> None:
        """Compute these positions of [rows * width], of which the first ``count`` are read; all of them for None."""
        self.index, self.count = index, count
        self._shape: tuple[int, ...] | None = None

    def _narrow(self, mlp: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden = inputs[0]
        if self.index is None or len(self.index) >= hidden.shape[:-1].numel():
            return None
        self._shape = hidden.shape
        return (hidden.flatten(0, -2).index_select(0, self.index)[None],)

    def _widen(self, mlp: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        shape, self._shape = self._shape, None
        if shape is None or self.index is None:
            return None
        whole = output.new_zeros(shape).flatten(0, -2)
        return whole.index_copy_(0, self.index[: self.count], output[0, : self.count]).view(shape)


def last_mlp(model: nn.Module) -> nn.Module | None:
    """The gated MLP of a causal language model's last layer; None where there is none."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    mlp = getattr(layers[-1], "mlp", None) if isinstance(layers, nn.ModuleList) and len(layers) else None
    parts = {name for name, _ in mlp.named_children()} - {"act_fn"} if isinstance(mlp, nn.Module) else set()
    return mlp if parts == GATED else None
