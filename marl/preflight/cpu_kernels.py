"""What this machine's CPU computes slowly."""

import logging
from collections.abc import Iterable

import torch
from omegaconf import DictConfig

from marl.config.policies import own_settings
from marl.config.precision import compute_dtype
from marl.preflight.packages import engines_of

logger = logging.getLogger(__name__)


def warn_of_slow_bf16(config: DictConfig, policies: Iterable[str], has_critics: bool) -> None:
    """Warn if a run on a CPU computes in bf16, and this one multiplies such matrices without vector instructions: a forward pass of
    14 million parameters takes 5 times as long as in full precision, a backward pass 27 times."""
    if config.trainer.device != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    engines = {compute_dtype(engine) for *_, engine in engines_of(config, has_critics)}
    servers = {own_settings(config, name).rollout.dtype for name in policies}
    if "bfloat16" in engines | servers:
        logger.warning(
            "bf16 is slow on this CPU, which has AVX2 but not AVX-512: a training step takes some twenty times as long as in full "
            "precision. Set precision=fp32, and leave out policies.<name>.precision"
        )
