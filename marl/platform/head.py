"""Log-probs and entropy at the positions that are read: a model's head computes no other logits, and large ones in slices.

Hooks select the positions between a causal language model's body and its head, so that the head, its adapters and what the
model does to the logits afterwards (scaling, soft-capping) stay the model's own; before that, those that the last layer's MLP
computes (``last_layer``). Logits of a real vocabulary (150,000 floats
a token) are never whole: see ``sliced_head``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name

from marl.platform.last_layer import SelectiveMLP, last_mlp
from marl.platform.shapes import MIN_ROWS, missing_rows
from marl.platform.sliced_head import Tail, may_slice, must_slice, sliced_log_probs

UNSUPPORTED = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
"""Settings under which verl reads the logits of every position."""


@dataclass
class Reading:
    """Positions of one micro-batch whose log-probs are read: N of its tokens, in jagged rows and as laid out for the model."""

    flat: Tensor
    """[N] position among the jagged tokens; its output predicts the next one."""
    index: Tensor
    """[M] the same among the model's [rows, width]; M is a multiple of MIN_ROWS, and the first N count."""
    labels: Tensor
    temperature: Tensor
    offsets: Tensor
    entropy: bool
    selected: bool = field(default=False, init=False)
    """True once the model's logits are those of ``index`` alone."""
    sliced: bool = field(default=False, init=False)
    """True once the model's logits are log-probs and entropy instead."""

    def outputs(self, logits: Tensor) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy`` ragged like ``input_ids``; positions that are not read are zero."""
        picked = logits[0] if self.selected else logits.flatten(0, 1).index_select(0, self.index)
        columns = picked if self.sliced else log_probs_and_entropy(picked, self.labels, self.temperature, self.entropy)
        names = ("log_probs", "entropy") if self.entropy else ("log_probs",)
        whole = columns.new_zeros(int(self.offsets[-1]), columns.shape[-1]).index_put(
            (self.flat,), columns[: len(self.flat)]
        )
        return {
            name: torch.nested.nested_tensor_from_jagged(whole[:, i].contiguous(), self.offsets)
            for i, name in enumerate(names)
        }


def reading_of(micro_batch: TensorDict, output_args: dict[str, Any], width: int) -> Reading | None:
    """Response positions that a mask trains or reports, in rows ``width`` wide; None where verl reads every position."""
    responses, ids = micro_batch["responses"], micro_batch["input_ids"]
    if not responses.is_nested or any(tu.get_non_tensor_data(micro_batch, key, False) for key in UNSUPPORTED):
        return None
    packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
    offsets, lengths = ids.offsets(), responses.offsets().diff()
    token = mask_of(micro_batch).nonzero()[:, 0]
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)[token]
    # output t predicts token t + 1
    flat = token + (offsets[1:] - 1 - responses.offsets()[1:])[row]
    index = flat if packed else flat - offsets[row] + row * width
    temperature = output_args["temperature_rmpad"][index] if packed else output_args["temperature"][row]
    missing = missing_rows(len(index))
    return Reading(
        flat=flat,
        index=nn.functional.pad(index, (0, missing)),
        labels=nn.functional.pad(responses.values()[token], (0, missing)),
        temperature=nn.functional.pad(temperature, (0, missing), value=1.0),
        offsets=offsets,
        entropy=bool(tu.get_non_tensor_data(micro_batch, "calculate_entropy", False)),
    )


def mask_of(micro_batch: TensorDict) -> Tensor:
    """Tokens of the responses that a loss or its reader counts; all of them where verl's trainer gave dense masks."""
    masks = [micro_batch[key] for key in ("loss_mask", "response_mask") if key in micro_batch]
    if not masks or not all(mask.is_nested for mask in masks):
        return torch.ones_like(micro_batch["responses"].values(), dtype=torch.bool)
    return torch.stack([mask.values() != 0 for mask in masks]).any(0)


def log_probs_and_entropy(logits: Tensor, labels: Tensor, temperature: Tensor, entropy: bool) -> Tensor:
    """[N, 1], or [N, 2] with the entropy."""
    log_softmax = (logits.float() / temperature[:, None]).log_softmax(-1)
    columns = [log_softmax.gather(1, labels[:, None])[:, 0]]
    if entropy:
        columns.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return torch.stack(columns, -1)


class SelectiveHead:
    """Makes the next forward pass of a causal language model compute its head at a ``Reading``'s positions alone.

    The positions are taken out of what enters the head. Where their logits would be too large, one position enters, and the
    log-probs of all, sliced, leave in place of its logits: within the head's own call, because FSDP gathers its weights for
    no longer, and through FSDP's hooks, because the backward pass gathers them again.
    """

    def __init__(self, root: Any) -> None:
        self.model = root.get_base_model() if hasattr(root, "get_base_model") else root
        self.head = self.model.get_output_embeddings()
        self.tail: Tail | None = None
        self.mlp: SelectiveMLP | None = None
        self.expect(None)
        if self.head is None:
            return
        if is_linear(self.head) and may_slice(self.head.out_features):
            self.tail = measured_tail(root, self.head)
        self.head.register_forward_pre_hook(self._select)
        self.head.register_forward_hook(self._slice, prepend=True)  # before FSDP's
        self.head.register_forward_hook(self._keep)  # after FSDP's
        self.model.register_forward_hook(self._replace, prepend=True)
        if (mlp := last_mlp(self.model)) is not None:
            self.mlp = SelectiveMLP(mlp)
            self.model.register_forward_pre_hook(self._begin)

    def expect(self, reading: Reading | None) -> None:
        self.reading = reading
        self._hidden: Tensor | None = None
        self._columns: Tensor | None = None

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        reading = self.reading
        assert self.mlp is not None
        self.mlp.select(None) if reading is None else self.mlp.select(reading.index, len(reading.flat))

    def _select(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        reading = self.reading
        if reading is None or reading.selected:
            return None
        hidden = inputs[0].flatten(0, 1).index_select(0, reading.index)  # its gradient is cheaper than an index's
        reading.selected = True
        if self.tail is None or not self._slices(hidden, self.tail):
            return (hidden[None],)
        self._hidden = hidden
        return (hidden[None, :1].detach(),)

    def _slices(self, hidden: Tensor, tail: Tail) -> bool:
        """True for logits that would be too large, and for those that a model caps or scales in half precision: slices are capped
        in full precision, and the log-probs of one pass must not differ from another's by the number of its tokens."""
        rounds = tail != Tail() and hidden.dtype != torch.float32
        return rounds or must_slice(len(hidden), self.head.out_features, hidden.device)

    def _slice(self, head: nn.Linear, inputs: Any, logits: Tensor) -> Tensor | None:
        reading, hidden, self._hidden = self.reading, self._hidden, None
        if reading is None or hidden is None or self.tail is None:
            return None
        reading.sliced = True
        return sliced_log_probs(hidden, head, reading.labels, reading.temperature, self.tail, reading.entropy)[None]

    def _keep(self, head: nn.Module, inputs: Any, columns: Tensor) -> None:
        if self.reading is not None and self.reading.sliced:
            self._columns = columns

    def _replace(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._columns is not None:
            output.logits = self._columns  # what the model made of them meant logits
        self.expect(None)


def is_linear(head: nn.Module) -> bool:
    """True for a plain linear layer, FSDP's included; false for adapters and quantised ones."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def measured_tail(root: nn.Module, head: nn.Linear) -> Tail | None:
    """Scaling and soft-capping of a model's logits, measured: chosen numbers take the place of the head's output."""
    points, device = Tail.probe(head.out_features), torch.device(get_device_name())
    handles = [
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :1],)),
        head.register_forward_hook(lambda _, inputs, __: points.to(inputs[0].device)[None, None]),
    ]
    ids = torch.zeros(1, MIN_ROWS, dtype=torch.long, device=device)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [get_device_id()]):
            logits = root(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return Tail.from_values(points, logits.flatten().cpu())
