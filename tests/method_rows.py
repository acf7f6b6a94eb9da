"""Methods, and rows for their losses by hand."""

from typing import Any

import torch
from tensordict import TensorDict

from marl.methods import METHODS
from marl.utils.ragged import jagged


def method(name, **options):
    cls: Any = METHODS.get(name)
    return cls(cls.Config(name=name, **options))


def rows_of(log_probs, masks, examples, sides, reference=None):
    rows = {
        "responses": jagged([[0] * len(row) for row in log_probs], torch.long),
        "response_mask": jagged(masks, torch.long),
        "log_probs": jagged(log_probs, torch.float32),
        "example": torch.tensor(examples),
        "side": torch.tensor(sides),
    }
    if reference is not None:
        rows["ref_log_prob"] = jagged(reference, torch.float32)
    return TensorDict(rows, batch_size=[len(log_probs)])


def two_pairs():
    """Log-ratios: pair 7 chosen -1 + .5 = -.5 less rejected .3 gives -.8; pair 9 chosen .4 less rejected -.6 gives 1."""
    log_probs = [[-1.0, -0.5, -9.0], [-0.7], [-0.6, -1.0], [-2.0]]
    reference = [[-0.5, -0.5, -1.0], [-1.0], [-1.0, -1.0], [-1.4]]
    masks = [[1, 1, 0], [1], [1, 1], [1]]
    return rows_of(log_probs, masks, [7, 7, 9, 9], [0, 1, 0, 1], reference)
