"""Masks over dense grids."""

from torch import Tensor


def last_along(mask: Tensor, dim: int) -> Tensor:
    """The mask's last 1 along an axis; 0 elsewhere."""
    return mask * (mask.flip(dim).cumsum(dim).flip(dim) == 1)
