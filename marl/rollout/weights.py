"""Weights on their way to a server in another process."""

import warnings
from typing import Any

import numpy as np
import torch

Packed = dict[str, tuple[np.ndarray, torch.dtype, torch.Size]]


class Weights(dict[str, torch.Tensor]):
    """Tensors by name. Pickled as numpy arrays, which Ray copies once, into shared memory; a tensor it copies several times.
    They arrive as a plain dict of read-only tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        packed = {name: (bytes_of(tensor), tensor.dtype, tensor.shape) for name, tensor in self.items()}
        return unpacked, (packed,)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return array


def unpacked(packed: Packed) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return {name: torch.from_numpy(data).view(dtype).view(shape) for name, (data, dtype, shape) in packed.items()}
