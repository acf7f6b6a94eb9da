"""Deterministic operations (``determinism=strict``), and the seeds of a process's generators."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from marl.config.engines import is_strict

VARIABLE = "MARL_DETERMINISM"
NO_FLASH_CROSS_ENTROPY = "VERL_DISABLE_FLASH_ATTN_CE"
"""verl's variable: "1" where it does not use flash attention's cross-entropy."""
ENVIRONMENT = {
    VARIABLE: "strict",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    NO_FLASH_CROSS_ENTROPY: "1",
    "PYTHONHASHSEED": "0",
}
"""Read by libraries when a process starts, and by ``follow_environment``."""


def environment_of(config: Any) -> dict[str, str]:
    """Environment variables of all processes of a run."""
    return dict(ENVIRONMENT) if is_strict(config) else {}


def follow_environment() -> None:
    """Let this process fail on operations without a deterministic form, if its run asks for that."""
    if os.environ.get(VARIABLE) == ENVIRONMENT[VARIABLE]:
        only_deterministic(True)


def only_deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=on)


@contextmanager
def strict_operations(config: Any) -> Iterator[None]:
    """The driver's part of a strict run, and the environment that its processes inherit, for as long as the block lasts."""
    wanted = environment_of(config)
    if not wanted:
        yield
        return
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    only_deterministic(True)
    try:
        yield
    finally:
        only_deterministic(False)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def seed_generators(seed: int) -> None:
    """Seed the generators of this process that anybody may draw from: dropout, layers that are not in a model's file, and
    modules of the user's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """States of these generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
