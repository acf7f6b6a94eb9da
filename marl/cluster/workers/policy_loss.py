"""Losses of a policy: verl's, or a linear loss with given gradients."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from marl.utils.ragged import of_responses

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


def policy_loss(
    own: Loss, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Linear loss for rows with ``gradients``, the policy's ``own`` for the others."""
    if "gradients" in data:
        return linear_loss(model_output, data)
    return own(model_output=model_output, data=data, dp_group=dp_group)


def linear_loss(model_output: dict[str, torch.Tensor], data: TensorDict) -> tuple[torch.Tensor, dict[str, Any]]:
    """sum_t g_t log pi(y_t), where g_t are the derivatives of a loss by the log-probs: its gradient is that loss's, at these
    weights.

    A sum over the whole batch, however ranks and micro-batches cut it: verl takes the mean over ``dp_size`` ranks.
    """
    log_probs = of_responses(model_output["log_probs"], data).values()
    mask = data["response_mask"].values()
    loss = (data["gradients"].values() * log_probs * mask).sum() * data["dp_size"]
    return loss, {}
