"""Training numbers of every turn: its reward, return, advantage and value. Pure, over rows and grids."""

import torch
from torch import Tensor

from marl.batch.joint import JointBatch

Numbers = dict[str, float | None]
"""``reward``, ``return``, ``advantage``, ``value``; None where there is none."""


def turn_numbers(batch: JointBatch, credit_ERA: Tensor) -> list[list[Numbers]]:
    """The numbers of every episode's turns, in their order.

    ``reward`` is what the credit scheme gave (an advantage, for a scheme of that kind); ``return`` what the turn was compared
    by, or its critic fitted to; ``advantage`` the mean over its tokens. Of a critic that values tokens, ``value`` and
    ``return`` are those of the turn's first token. Tokens that a rollout correction rejected do not count. A turn that is not trained has no advantage, and no critic values it.
    """
    spoke, trained = batch.spoken_ERA, batch.trained_ERA
    columns = {
        "reward": table(credit_ERA, spoke),
        "return": table(batch.returns_ERA, spoke if batch.critic_data.values_ERA is None else trained)
        or of_tokens(batch, "returns", first=True),
        "advantage": of_tokens(batch, "advantages"),
        "value": table(batch.critic_data.values_ERA, trained) or of_tokens(batch, "values", first=True),
    }
    return [[{key: column.get(cell) for key, column in columns.items()} for cell in cells] for cells in batch.cells]


def table(x_ERA: Tensor | None, mask_ERA: Tensor) -> dict[int, float]:
    """A grid's numbers by cell."""
    if x_ERA is None:
        return {}
    cells = mask_ERA.flatten().nonzero()[:, 0]
    return dict(zip(cells.tolist(), x_ERA.flatten()[cells].tolist(), strict=True))


def of_tokens(batch: JointBatch, key: str, first: bool = False) -> dict[int, float]:
    """A column's mean over each turn's tokens, or its value at the first of them, by cell."""
    found: dict[int, float] = {}
    for rows in batch.rows.values():
        index_T = rows["turn_index"].values()
        kept_T = (index_T >= 0) & rows["response_mask"].values().bool()
        if key not in rows or not kept_T.any():
            continue
        cells_D, turn_T = index_T[kept_T].unique(return_inverse=True)
        x_T = rows[key].values()[kept_T].double()
        count_D = torch.bincount(turn_T)
        if first:
            starts_D = torch.zeros_like(count_D).scatter_reduce(
                0, turn_T, torch.arange(len(turn_T)), "amin", include_self=False
            )
            x_D = x_T[starts_D]
        else:
            x_D = torch.zeros(len(cells_D), dtype=torch.double).index_add(0, turn_T, x_T) / count_D
        found |= dict(zip(cells_D.tolist(), x_D.tolist(), strict=True))
    return found
