"""Floating-point operations of a step, and the seconds that they take at a rate. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl.preflight.memory_plan import ModelSize


@dataclass(frozen=True)
class Work:
    """Operations of one policy in a step, by phase."""

    sampling: float = 0
    log_probs: float = 0
    reference: float = 0
    update: float = 0
    probe: float = 0
    """The answers that prove a weight sync, and the trainer's forward pass over them."""

    @property
    def total(self) -> float:
        return self.sampling + self.log_probs + self.reference + self.update + self.probe


@dataclass(frozen=True)
class Row:
    """Tokens of a row, and those of them that are answers, which alone need the head and, in a trainer, the last layer's MLP."""

    length: int
    answer: int


def sampled(size: ModelSize, row: Row) -> float:
    """A server's reading of a row: 2 operations for every weight that multiplies a token, and in each layer 4 x heads x head size
    for every pair of a token with one before it, of which there are length^2 / 2."""
    layers = 2 * row.length * (size.multiplied - size.embedding)
    return layers + 2 * row.answer * size.embedding + 2 * row.length**2 * size.layers * size.query_width


def forward(size: ModelSize, row: Row) -> float:
    """A trainer's: without the last layer's MLP where no log-prob is read."""
    return sampled(size, row) - 2 * (row.length - row.answer) * size.last_mlp


def training(size: ModelSize, row: Row, checkpointing: bool) -> float:
    """A forward pass, a backward pass of twice as much, and with gradient checkpointing the forward pass again."""
    return (4 if checkpointing else 3) * forward(size, row)


def work_of(
    size: ModelSize,
    rows: int,
    row: Row,
    epochs: int,
    *,
    turns: int,
    checkpointing: bool,
    log_probs: bool,
    reference: bool,
    probe: Row | None = None,
) -> Work:
    """A policy's work on so many equal rows and on ``turns`` that its servers answer, whether they are trained or not. A server
    reads every token once, as its keys and values are kept. ``probe``: what all servers answer to it, in a row for each."""
    once = forward(size, row)
    return Work(
        turns * sampled(size, row),
        rows * once * log_probs,
        rows * once * reference,
        epochs * rows * training(size, row, checkpointing),
        sampled(size, probe) + forward(size, probe) if probe else 0.0,
    )


def seconds(work: Mapping[str, Sequence[Work]], ranks: Mapping[str, int], rate: float) -> float:
    """The longest pool's: its members compute one after another, pools at the same time. ``rate``: operations of a rank in a
    second."""
    return max(sum(each.total for each in own) / (ranks[pool] * rate) for pool, own in work.items())
