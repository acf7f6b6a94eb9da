"""A warning of what this machine's CPU computes slowly."""

import logging
from collections.abc import Iterable, Iterator

import torch
from omegaconf import DictConfig

from marl.config.policies import own_settings, within
from marl.config.precision import compute_dtype, dtype_name
from marl.preflight.packages import engines_of

logger = logging.getLogger(__name__)


def warn_of_slow_bf16(config: DictConfig, policies: Iterable[str], has_critics: bool) -> None:
    """Warn of the first key by which a run on a CPU computes in bf16, if this machine's has no fast products of such matrices. On one
    with AVX2 alone, a forward pass of 14 million parameters took 5 times as long as in full precision, a backward pass 27 times."""
    if config.trainer.device != "cpu" or has_fast_bf16():
        return
    key = next(keys_in_bf16(config, policies, has_critics), None)
    if key is not None:
        logger.warning(
            "%s is bf16, for which this machine's CPU has no fast kernels: training can take twenty times as long as in fp32. Use fp32, "
            "which precision=null is with hardware=cpu", key,
        )  # fmt: skip


def has_fast_bf16() -> bool:
    """True if oneDNN multiplies bf16 matrices on this CPU, and where PyTorch is built without it."""
    return not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def keys_in_bf16(config: DictConfig, policies: Iterable[str], has_critics: bool) -> Iterator[str]:
    for whose, _, _, key, engine in engines_of(config, has_critics):
        if compute_dtype(engine) == "bfloat16":
            yield f"{whose}{key}.mixed_precision.param_dtype"
    for name in policies:
        if dtype_name(own_settings(config, name).rollout.dtype) == "bfloat16":
            yield f"{within(config, name)}actor_rollout_ref.rollout.dtype"
