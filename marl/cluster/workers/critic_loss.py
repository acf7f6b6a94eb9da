"""Critic losses at the positions where values are read: PPO's clipped loss, or a linear loss with given gradients."""

from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_value_loss
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_functional import masked_mean

from marl.utils.ragged import dense


def read_values(values: torch.Tensor, rows: TensorDict) -> torch.Tensor:
    """Cut the jagged values of whole rows down to those that are read, ragged like ``read_at``."""
    read_at = rows["read_at"]
    counts = read_at.offsets().diff()
    starts = torch.repeat_interleave(rows["input_ids"].offsets()[:-1], counts)
    return torch.nested.nested_tensor_from_jagged(
        values.values()[starts + read_at.values()].float(), offsets=read_at.offsets()
    )


def critic_loss(config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None):
    """Linear loss for rows with ``gradients``, PPO's clipped value loss for the others."""
    if "gradients" in data:
        return linear_loss(model_output, data)
    return value_loss(config, model_output, data, dp_group)


def linear_loss(model_output: dict[str, torch.Tensor], data: TensorDict):
    """sum_t g_t V_t, where g_t are the derivatives of a loss by the values: its gradient is that loss's, at these weights.

    A sum over the whole batch, however ranks and micro-batches cut it: verl takes the mean over ``dp_size`` ranks.
    """
    values = read_values(model_output["values"], data).values()
    values = torch.where(data["value_mask"].values().bool(), values, 0.0)
    loss = (data["gradients"].values() * values).sum() * data["dp_size"]
    return loss, {}


def value_loss(config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None):
    """verl's value loss (``critic.cliprange_value``, ``critic.loss_agg_mode``) on values, returns and mask of our rows.

    Normalised over the whole mini-batch, so that the gradient does not depend on how micro-batches cut it.
    """
    predicted = dense(read_values(model_output["values"], data))
    mask = dense(data["value_mask"]).bool()
    loss, clipped_share = compute_value_loss(
        vpreds=predicted,
        values=dense(data["values"]),
        returns=dense(data["returns"]),
        response_mask=mask,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
    share = mask.sum() * data["dp_size"] / max(data["batch_num_tokens"], 1)  # verl takes the mean over ranks
    parts = {
        "vf_loss": loss,
        "vf_clipfrac": clipped_share.detach() * share,
        "vpred_mean": masked_mean(predicted, mask).detach() * share,
    }
    return loss, {name: Metric(value=part, aggregation=AggregationType.SUM) for name, part in parts.items()}
