"""How much likelier an update made a turn, and what that means for the turns beside it. Pure."""

import math
from enum import Enum

import torch
from tensordict import TensorDict
from torch import Tensor

from marl.learners.base import spread
from marl.types import JointBatch, Metrics


class Ratio(Enum):
    """What pi_new / pi_old of a turn is; d is the difference of a token's log-probs."""

    sequence = "sequence"
    """exp(sum d): exact, and beyond all bounds for long answers."""
    geometric = "geometric"
    """exp(mean d): the geometric mean of the tokens' ratios."""
    token = "token"
    """mean exp(d): their arithmetic mean, one number too, for another agent's tokens do not line up with these."""


def log_ratios(log_probs: Tensor, rows: TensorDict, shape: torch.Size, ratio: Ratio) -> Tensor:
    """log pi_new / pi_old [E, R, A] of the turns in these rows; 0 for all others.

    ``log_probs`` are the new ones, ragged like ``responses``. Tokens out of ``response_mask`` do not count.
    """
    counted_T = (rows["turn_index"].values() >= 0) & rows["response_mask"].values().bool()
    cells_T = rows["turn_index"].values()[counted_T]
    deltas_T = (log_probs.values() - rows["old_log_probs"].values())[counted_T].double()
    logs = torch.zeros(shape.numel(), dtype=torch.float64)
    tokens = torch.bincount(cells_T, minlength=len(logs)).clamp(min=1)
    if ratio is Ratio.token:
        logs = (logs.index_add(0, cells_T, deltas_T.expm1()) / tokens).log1p()
    else:
        logs = logs.index_add(0, cells_T, deltas_T) / (tokens if ratio is Ratio.geometric else 1)
    return logs.float().view(shape)


def log_factors(log_ratios_ERA: Tensor, batch: JointBatch) -> Tensor:
    """log M [E, R, A]: M is the product of the ratios of a round's turns; 0 where it does not apply.

    An alternative that the conversation did not follow stands in a column behind the rounds, and is no part of their joint
    actions. A turn that is compared with its alternatives is worth its own verdict, whatever the others did.
    """
    applies_ERA = batch.path().mask_ERA.bool()
    if batch.siblings_ERA is not None:
        applies_ERA = applies_ERA & (batch.siblings_ERA < 0)
    return torch.where(applies_ERA, log_ratios_ERA.sum(-1, keepdim=True), 0.0)


def factors(log_factors_ERA: Tensor, clip: float | None) -> Tensor:
    """M, kept within [1 / clip, clip]; as it is where clip is None."""
    limit = math.inf if clip is None else math.log(clip)
    return log_factors_ERA.clamp(-limit, limit).exp()


def corrected(rows: TensorDict, factors_ERA: Tensor) -> TensorDict:
    """The rows with M times their advantages."""
    rows, advantages = rows.copy(), rows["advantages"]
    products_T = advantages.values() * spread(factors_ERA, rows).values()
    rows["advantages"] = torch.nested.nested_tensor_from_jagged(products_T, offsets=advantages.offsets())
    return rows


def factor_metrics(log_factors_ERA: Tensor, factors_ERA: Tensor, rows: TensorDict) -> Metrics:
    """Over the turns in these rows: the maximum of M before it was clipped, and its mean after that."""
    index_T = rows["turn_index"].values()
    cells_D = index_T[index_T >= 0].unique()
    highest = log_factors_ERA.flatten()[cells_D].max().double().exp()
    return {"factor_max": float(highest), "factor_mean": float(factors_ERA.flatten()[cells_D].mean())}


def share_rounds(rows: TensorDict, others: TensorDict, num_agents: int) -> bool:
    """Whether some round of some episode has turns of both."""
    rounds, other_rounds = (
        index[index >= 0] // num_agents for index in (part["turn_index"].values() for part in (rows, others))
    )
    return bool(torch.isin(rounds, other_rounds).any())
