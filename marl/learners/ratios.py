"""Likelihood ratios of updated turns, and how they correct other agents' turns. Pure."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners.base import broadcast_to_tokens
from marl.types import Metrics

if TYPE_CHECKING:
    from tensordict import TensorDict


class Ratio(Enum):
    """Definition of pi_new / pi_old for a turn; d is the difference of a token's log-probs."""

    sequence = "sequence"
    """exp(sum d): exact, but unbounded for long answers."""
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


def laps(mask_ERA: Tensor) -> Tensor:
    """The number [E, R] of every round's lap: a maximal run of an episode's rounds, from the first one on, in which no agent
    speaks twice. Where all speak in every round a lap is a round; where they take turns it is once around the team."""
    spoke_EA, lap_E = torch.zeros_like(mask_ERA[:, 0], dtype=torch.bool), torch.zeros(len(mask_ERA), dtype=torch.long)
    laps_ER = torch.zeros(mask_ERA.shape[:2], dtype=torch.long)
    for r, speak_EA in enumerate(mask_ERA.bool().unbind(1)):
        again_E = (spoke_EA & speak_EA).any(-1)
        spoke_EA = torch.where(again_E[:, None], speak_EA, spoke_EA | speak_EA)
        lap_E = lap_E + again_E
        laps_ER[:, r] = lap_E
    return laps_ER


def log_factors(log_ratios_ERA: Tensor, batch: JointBatch) -> Tensor:
    """log M [E, R, A]: M is the product of the ratios of a lap's turns; 0 where it does not apply.

    An alternative that the conversation did not follow stands in a column behind the rounds, and is no part of their joint
    actions. A turn that is compared with its alternatives gets its own score, whatever the others did.
    """
    applies_ERA = batch.mask_ERA
    laps_ER = laps(applies_ERA)
    round_sums_ER = torch.where(applies_ERA, log_ratios_ERA, 0.0).sum(-1)
    lap_sums_ER = torch.zeros_like(round_sums_ER).scatter_add(1, laps_ER, round_sums_ER).gather(1, laps_ER)
    return torch.where(batch.chained_ERA, lap_sums_ER[..., None], 0.0)


def factors(log_factors_ERA: Tensor, clip: float | None) -> Tensor:
    """M, kept within [1 / clip, clip]; as it is where clip is None."""
    limit = math.inf if clip is None else math.log(clip)
    return log_factors_ERA.clamp(-limit, limit).exp()


def corrected(rows: TensorDict, factors_ERA: Tensor) -> TensorDict:
    """The rows with M times their advantages."""
    rows, advantages = rows.copy(), rows["advantages"]
    products_T = advantages.values() * broadcast_to_tokens(factors_ERA, rows).values()
    rows["advantages"] = torch.nested.nested_tensor_from_jagged(products_T, offsets=advantages.offsets())
    return rows


def factor_metrics(log_factors_ERA: Tensor, factors_ERA: Tensor, rows: TensorDict) -> Metrics:
    """Over the turns in these rows: the maximum of M before it was clipped, and its mean after that."""
    index_T = rows["turn_index"].values()
    cells_D = index_T[index_T >= 0].unique()
    highest = log_factors_ERA.flatten()[cells_D].max().double().exp()
    return {"factor_max": float(highest), "factor_mean": float(factors_ERA.flatten()[cells_D].mean())}


def share_laps(rows: TensorDict, others: TensorDict, batch: JointBatch) -> bool:
    """True if some lap of some episode has turns of both, alternatives excluded."""
    mask_ERA = batch.mask_ERA.bool()
    num_rounds, laps_ER = mask_ERA.shape[1], laps(mask_ERA)
    numbers_ER = torch.arange(len(laps_ER))[:, None] * num_rounds + laps_ER
    own, theirs = (
        numbers_ER.flatten()[index[mask_ERA.flatten()[index]] // len(batch.agents)]
        for index in (part["turn_index"].values()[part["turn_index"].values() >= 0] for part in (rows, others))
    )
    return bool(torch.isin(own, theirs).any())
