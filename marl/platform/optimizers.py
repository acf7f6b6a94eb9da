"""verl's optimizers, which on a CPU step all parameters in one call where torch has a fused step."""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from verl.workers.config.optimizer import build_optimizer

IMPLEMENTATIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Arguments by which torch's optimizers choose how to step."""


def optimizer_of(parameters: Iterable[torch.nn.Parameter], config: Any) -> torch.optim.Optimizer:
    """The optimizer of verl's settings; with a fused step where all parameters are in a CPU's memory."""
    parameters = list(parameters)
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    optimizer: torch.optim.Optimizer = build_optimizer(parameters, fused(config) if on_cpu else config)
    return optimizer


def fused(config: Any) -> Any:
    """Optimizer settings with torch's fused step, where it has one and the settings ask for no other: for sharded parameters torch
    steps one by one, which takes seven times as long."""
    own = config.override_optimizer_config or {}
    kind = getattr(torch.optim, config.optimizer, None) if config.optimizer_impl == "torch.optim" else None
    if kind is None or IMPLEMENTATIONS & set(own) or "fused" not in inspect.signature(kind).parameters:
        return config
    return replace(config, override_optimizer_config={**own, "fused": True})
