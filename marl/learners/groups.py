"""Groups: which turns are compared with one another, and how many of them teach nothing."""

from collections.abc import Collection
from enum import Enum

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.base import broadcast_to_tokens
from marl.types import Metrics

DEGENERATE = "team/degenerate_groups"


class GroupKey(Enum):
    task = 0
    round = 1
    agent = 2


class WeightBy(Enum):
    """Unit that counts once in the mean and the deviation of a group, in which an episode may have several turns.

    turn:     b = sum_t R_t / T                       over all T turns of the group
    episode:  b = 1/E sum_e (1/T_e sum_{t in e} R_t)  over its E episodes, of T_e turns each
    """

    turn = "turn"
    """Long conversations count more than short ones."""
    episode = "episode"


def episode_weights(batch: JointBatch, keys_ERA: Tensor) -> Tensor:
    """1 / T_e on each of an episode's T_e turns in a group, so that they count as one [E, R, A]. A turn that is compared with its
    alternatives counts by itself."""
    episodes_E11 = torch.arange(len(keys_ERA))[:, None, None]
    index_B, count_G = credit.group_index((keys_ERA * len(keys_ERA) + episodes_E11)[batch.spoken_ERA])
    weights_ERA = torch.ones(keys_ERA.shape)
    weights_ERA[batch.spoken_ERA] = 1.0 / count_G[index_B]
    return batch.apart(weights_ERA, torch.ones(keys_ERA.shape))


def group_keys(batch: JointBatch, group_by: Collection[GroupKey]) -> Tensor:
    """The group number [E, R, A] of every turn: turns that agree in all of ``group_by`` share one, alternatives of one turn
    have their own."""
    tasks_E, _ = credit.group_index(batch.tasks_E)
    shape = batch.spoken_ERA.shape
    axes = [tasks_E, torch.arange(shape[1]), torch.arange(shape[2])]
    keys_ERA = torch.zeros(shape, dtype=torch.long)
    for axis, numbers in enumerate(axes):
        if GroupKey(axis) in group_by:
            view = [1, 1, 1]
            view[axis] = -1
            keys_ERA = keys_ERA * (int(numbers.max()) + 1) + numbers.view(view)
    sets_ERA = keys_ERA.max() + 1 + batch.siblings_ERA
    return torch.where(batch.siblings_ERA >= 0, sets_ERA, keys_ERA)


def policy_keys(batch: JointBatch) -> Tensor:
    """The group number [E, R, A] of every turn where all turns that train a policy are one group; untrained turns have their
    own."""
    keys_ERA = torch.zeros(batch.spoken_ERA.shape, dtype=torch.long)
    for number, rows in enumerate(batch.rows.values(), start=1):
        index_T = rows["turn_index"].values()
        keys_ERA.view(-1)[index_T[index_T >= 0]] = number
    return keys_ERA


def group_means(x_ERA: Tensor, counted_ERA: Tensor, keys_ERA: Tensor) -> Tensor:
    """The mean [E, R, A] of every turn's group over its counted turns; 0 where it has none."""
    index_N, count_G = credit.group_index(keys_ERA.flatten())
    counts_G, sums_G = torch.zeros(2, len(count_G), dtype=x_ERA.dtype)
    counts_G.index_add_(0, index_N, counted_ERA.flatten().to(x_ERA.dtype))
    sums_G.index_add_(0, index_N, torch.where(counted_ERA.bool(), x_ERA, 0.0).flatten())
    return (sums_G / counts_G.clamp(min=1))[index_N].view(x_ERA.shape)


def clear_turns(batch: JointBatch, turns_ERA: Tensor) -> None:
    """Set the advantages of these turns to exactly 0."""
    for rows in batch.rows.values():
        advantages, cleared = rows["advantages"], broadcast_to_tokens(turns_ERA.float(), rows).values().bool()
        rows["advantages"] = torch.nested.nested_tensor_from_jagged(
            advantages.values().masked_fill(cleared, 0.0), offsets=advantages.offsets()
        )


def unequal_turns(batch: JointBatch, returns_ERA: Tensor, keys_ERA: Tensor) -> Tensor:
    """The turns [E, R, A] whose group holds two different returns: the others teach nothing."""
    spoke_ERA = batch.spoken_ERA.bool()
    index_B, count_G = credit.group_index(keys_ERA[spoke_ERA])
    unequal_ERA = torch.zeros_like(spoke_ERA)
    scale_B = score_scale(batch).expand(spoke_ERA.shape)[spoke_ERA]
    unequal_ERA[spoke_ERA] = credit.unequal_groups(returns_ERA[spoke_ERA], index_B, len(count_G), scale_B)[index_B]
    return unequal_ERA


def score_scale(batch: JointBatch) -> Tensor:
    """The largest score of each episode [E, 1, 1], whose rounding errors its returns have. The log-probs in a KL penalty are of single
    precision: theirs count as those of scores of that size."""
    scale_E = torch.maximum(batch.scores_ERA.abs().amax((1, 2)), batch.team_score_E.abs())
    if any("kl_penalty" in rows for rows in batch.rows.values()):
        scale_E = scale_E.clamp(min=1) * credit.ROUNDING[torch.float32] / credit.ROUNDING[scale_E.dtype]
    return scale_E[:, None, None]


def degenerate_share(batch: JointBatch, unequal_ERA: Tensor, keys_ERA: Tensor) -> Metrics:
    """Share of degenerate groups, whose rewards are all equal, among those with a trained turn; per agent, the share of its
    trained turns in such groups."""
    trained_ERA = batch.trained_ERA.bool()
    groups = keys_ERA[trained_ERA].unique()
    shares = {}
    if len(groups):
        shares[DEGENERATE] = float(1 - len(keys_ERA[unequal_ERA & trained_ERA].unique()) / len(groups))
    return shares | {
        f"agent/{agent}/degenerate_groups": float((~unequal_ERA[..., a])[trained_ERA[..., a]].float().mean())
        for a, agent in enumerate(batch.agents)
        if trained_ERA[..., a].any()
    }
