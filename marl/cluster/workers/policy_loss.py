"""Policy losses: verl's, with ``geo_mean`` corrected, or a linear loss with given gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_policy_loss_geo_mean, register_policy_loss
from verl.utils.metric import AggregationType, Metric

from marl.utils.ragged import of_responses

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]
TOKEN_MEANS = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")


def policy_loss(
    own: Loss, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Linear loss for rows with ``gradients``, the policy's ``own`` for the others; 0 where all are padding."""
    if "gradients" in data:
        return linear_loss(model_output, data)
    loss = zero_loss(own) if is_padding(data) else own
    value, metrics = loss(model_output=model_output, data=data, dp_group=dp_group)
    return value, metrics | parts_of_means(metrics, data)


def parts_of_means(metrics: Mapping[str, Any], data: TensorDict) -> dict[str, Metric]:
    """verl's token means of a micro-batch, rescaled so that their sum is the mini-batch's token mean. verl itself averages over
    micro-batches, however many tokens each has."""
    found = {key: metrics[key].aggregate() for key in TOKEN_MEANS if key in metrics}
    if not found:
        return {}
    tokens = mask_of(data).sum().item() * data["dp_size"]  # verl takes the mean over ranks
    share = tokens / max(data["batch_num_tokens"], 1)
    return {key: Metric(value=mean * share, aggregation=AggregationType.SUM) for key, mean in found.items()}


@register_policy_loss("geo_mean")
def geo_mean(*, response_mask: Tensor, config: Any, **given: Any) -> tuple[Tensor, dict[str, Any]]:
    """GMPO (arXiv:2507.20673), normalised over the whole mini-batch. verl averages over the rows of each micro-batch, so that its
    gradient grows with the number of micro-batches."""
    loss, metrics = compute_policy_loss_geo_mean(response_mask=response_mask, config=config, **given)
    batch = config.global_batch_info
    return loss * (len(response_mask) * batch["dp_size"] / batch["global_batch_size"]), metrics


def is_padding(rows: TensorDict) -> bool:
    """True for rows of a policy without a token to train."""
    return "response_mask" in rows and not bool(mask_of(rows).any())


def mask_of(rows: TensorDict) -> Tensor:
    mask = rows["response_mask"]
    return mask.values() if mask.is_nested else mask


def zero_loss(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of 0 with the metrics of ``loss_function``, which may refuse an empty mask, as verl's does in bypass mode. Ranks
    must have as many values of a metric, therefore they are 0 and not left out."""

    def zero(data: TensorDict, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        rows = data.copy()
        rows["response_mask"] = torch.ones_like(data["response_mask"])
        loss, metrics = loss_function(data=rows, **options)
        return 0.0 * loss, {key: zeroed(value) for key, value in metrics.items()}

    return zero


def zeroed(value: Any) -> Any:
    return Metric(value.aggregation, 0.0) if isinstance(value, Metric) else value


def linear_loss(model_output: dict[str, Tensor], data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
    """sum_t g_t log pi(y_t), where g_t are the derivatives of a loss by the log-probs: its gradient is that loss's, at these
    weights.

    A sum over the whole batch, however ranks and micro-batches cut it: verl takes the mean over ``dp_size`` ranks.
    """
    log_probs = of_responses(model_output["log_probs"], data).values()
    log_probs = torch.where(data["response_mask"].values().bool(), log_probs, 0.0)
    loss = (data["gradients"].values() * log_probs).sum() * data["dp_size"]
    return loss, {}
