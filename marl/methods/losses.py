"""Losses of answers, with their derivatives by every token's log-prob. Pure.

A worker descends the linear loss sum_t g_t log pi(y_t), whose gradient at the present weights is that of the loss with the
derivatives g_t: however ranks, micro-batches and packed rows cut the data, pairs included.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from marl.types import PolicyName

if TYPE_CHECKING:
    from tensordict import TensorDict


class PreferenceLoss(Enum):
    """Loss of a pair's margin h: the log-ratio to the reference of the chosen side less that of the rejected one."""

    sigmoid = "sigmoid"
    """DPO (arXiv:2305.18290): -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), with label smoothing s."""
    ipo = "ipo"
    """IPO (arXiv:2310.12036): (h - 1 / (2 beta))^2."""
    hinge = "hinge"
    """SLiC (arXiv:2305.10425), on log-ratios: max(0, 1 - beta h)."""


def preference_loss(kind: PreferenceLoss, margin_P: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Each pair's loss."""
    scaled_P = beta * margin_P
    if kind is PreferenceLoss.ipo:
        return (margin_P - 1 / (2 * beta)) ** 2
    if kind is PreferenceLoss.hinge:
        return (1 - scaled_P).clamp(min=0)
    return -(1 - smoothing) * logsigmoid(scaled_P) - smoothing * logsigmoid(-scaled_P)


def preference_slope(kind: PreferenceLoss, margin_P: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """The derivative of each pair's loss by its margin."""
    scaled_P = beta * margin_P
    if kind is PreferenceLoss.ipo:
        return 2 * (margin_P - 1 / (2 * beta))
    if kind is PreferenceLoss.hinge:
        return -beta * (scaled_P < 1).to(margin_P.dtype)
    return beta * (smoothing * torch.sigmoid(scaled_P) - (1 - smoothing) * torch.sigmoid(-scaled_P))


def trained(rows: TensorDict) -> Tensor:
    """1 on the tokens of the responses that are trained, else 0."""
    return rows["response_mask"].values().double()


def mean_gradients(rows: TensorDict) -> Tensor:
    """Derivatives of the mean negative log-likelihood of the trained tokens: -1 / N on each, ragged like ``responses``."""
    mask_T = trained(rows)
    return ragged(-mask_T / mask_T.sum().clamp(min=1), rows)


def weighted_gradients(rows: TensorDict, weight: float) -> Tensor:
    """Derivatives of the mean loss of the agents' own turns (side 0), and ``weight`` times that of the predicted ones, ragged like
    ``responses``."""
    own_T, predicted_T = parts(rows)
    share_T = own_T / own_T.sum().clamp(min=1) + weight * predicted_T / predicted_T.sum().clamp(min=1)
    return ragged(-share_T, rows)


def parts(rows: TensorDict) -> tuple[Tensor, Tensor]:
    """1 on the trained tokens of the agents' own turns, else 0; the same for turns of peers that they predict."""
    side_T = rows["side"].repeat_interleave(rows["responses"].offsets().diff())
    return trained(rows) * (side_T == 0), trained(rows) * (side_T > 0)


def loss_of(rows: TensorDict, mask_T: Tensor) -> float:
    """The mean negative log-likelihood of these tokens, from ``log_probs``; 0 without any."""
    log_probs_T = torch.where(mask_T > 0, rows["log_probs"].values().double(), 0.0)
    return float(-log_probs_T.sum() / mask_T.sum().clamp(min=1))


def side_losses(rows: TensorDict) -> dict[int, float]:
    """The mean loss of every side from 1 on that rows hold."""
    side_T = rows["side"].repeat_interleave(rows["responses"].offsets().diff())
    sides = [side for side in rows["side"].unique().tolist() if side]
    return {side: loss_of(rows, trained(rows) * (side_T == side)) for side in sides}


def mean_loss(rows: TensorDict) -> float:
    """The mean negative log-likelihood of the trained tokens, from ``log_probs``."""
    return loss_of(rows, trained(rows))


def log_ratios(rows: TensorDict) -> Tensor:
    """log pi - log pi_ref [P, 2] of each pair's chosen and rejected side, summed over its trained tokens; pi_ref is uniform
    where rows have no ``ref_log_prob``."""
    delta_T = rows["log_probs"].values().double()
    if "ref_log_prob" in rows:
        delta_T = delta_T - rows["ref_log_prob"].values().double()
    delta_T = torch.where(trained(rows) > 0, delta_T, 0.0)
    return delta_T.new_zeros(2 * num_pairs(rows)).index_add(0, places(rows), delta_T).view(-1, 2)


def pair_gradients(slope_P: Tensor, rows: TensorDict) -> Tensor:
    """Derivatives of the mean of the pairs' losses by every trained token's log-prob, ragged like ``responses``."""
    slope_PS = torch.stack([slope_P, -slope_P], -1) / len(slope_P)
    return ragged(slope_PS.flatten()[places(rows)] * trained(rows), rows)


def share_margins(rows: Mapping[PolicyName, TensorDict]) -> None:
    """Give every row its pair's ``margin``, summed over the log-ratios of all policies, and the number of ``pairs``."""
    if not rows:
        return
    example_P = torch.cat([own["example"] for own in rows.values()]).unique()
    margin_P = torch.zeros(len(example_P), dtype=torch.float64)
    for own in rows.values():
        ratios_PS = log_ratios(own)
        margin_P.index_add_(
            0, torch.searchsorted(example_P, own["example"].unique()), ratios_PS[:, 0] - ratios_PS[:, 1]
        )
    for own in rows.values():
        own["margin"] = margin_P[torch.searchsorted(example_P, own["example"])]
        own["pairs"] = torch.full((len(own),), len(example_P))


def joint_margins(rows: TensorDict) -> Tensor:
    """The shared margin of each of a policy's pairs [P]."""
    _, pair_B = rows["example"].unique(return_inverse=True)
    return rows["margin"].new_zeros(num_pairs(rows)).scatter(0, pair_B, rows["margin"])


def joint_gradients(slope_B: Tensor, rows: TensorDict) -> Tensor:
    """Derivatives of the mean of all policies' pairs, from the slope by each row's shared margin, ragged like ``responses``."""
    own_B = slope_B * (1 - 2 * rows["side"]) / rows["pairs"]
    return ragged(own_B.repeat_interleave(rows["responses"].offsets().diff()) * trained(rows), rows)


def places(rows: TensorDict) -> Tensor:
    """Index of every response token's pair and side in a flattened [P, 2] grid."""
    _, pair_B = rows["example"].unique(return_inverse=True)
    return torch.repeat_interleave(2 * pair_B + rows["side"], rows["responses"].offsets().diff())


def num_pairs(rows: TensorDict) -> int:
    return len(rows["example"].unique())


def ragged(values_T: Tensor, rows: TensorDict) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values_T.float(), offsets=rows["responses"].offsets())
