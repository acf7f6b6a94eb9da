"""torch's saved states, which are pickles: what one names is looked at before it is read, and reading one executes nothing."""

import importlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray

NUMPY_STATE: list[Any] = [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("uint32"))]
"""All that a saved random state of numpy names, beyond what torch reads by itself."""
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's own variable: with it, ``torch.load`` executes nothing even where its caller passes ``weights_only=False``."""


def known_names() -> Any:
    """A context in which torch reads shards and random states of numpy."""
    importlib.import_module(
        "torch.distributed.tensor"
    )  # which makes its tensors known; it takes .8 s, and a command may read nothing
    return torch.serialization.safe_globals(NUMPY_STATE)


def read(path: str | Path) -> Any:
    """A saved state. Raises UnpicklingError for one that names anything but tensors and random states."""
    with known_names():
        return torch.load(path, weights_only=True)


@contextmanager
def read_by_verl() -> Iterator[None]:
    """While this lasts, verl's own ``torch.load`` reads as :func:`read` does."""
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        with known_names():
            yield
    finally:
        if before is None:
            del os.environ[FORCED]
        else:
            os.environ[FORCED] = before


def foreign_names(path: Path) -> list[str]:
    """Functions and classes that reading this file by pickle would call, beyond those of tensors and random states."""
    try:
        with known_names():
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        return [f"what torch never writes ({error})"]
    return sorted(names)
