"""Decisions, which critics value and estimators credit: turns, or the tokens of turns. Pure.

A *decision* is a turn where the critic values turns (``critic.level=turn``), a token where it values tokens; what a rollout
correction rejected is none, so that the reward of a turn stands at the last of its tokens that is left. A *trajectory*
is the decisions of one agent in one episode in the order in which they were taken, whatever policies it acted with; those of
one turn where the credit holds the future already; or, in a chain, those of all agents, one after another inside a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners.base import broadcast_to_tokens
from marl.learners.credit import returns_to_go
from marl.learners.credit_schemes import CreditKind
from marl.learners.groups import GroupKey, group_keys, group_means

if TYPE_CHECKING:
    from tensordict import TensorDict


def kept_tokens(rows: TensorDict) -> Tensor:
    """Mask [T] of answer tokens that no rollout correction rejected."""
    return (rows["turn_index"].values() >= 0) & rows["response_mask"].values().bool()


@dataclass
class Decisions:
    """The decisions D of one policy's rows."""

    rows: TensorDict
    cells_D: Tensor
    """Index of each decision's turn in the flattened [E, R, A] grid."""
    values_D: Tensor
    penalties_D: Tensor
    """KL penalty against the reference, subtracted from the reward."""
    of_tokens: bool

    @classmethod
    def of(cls, batch: JointBatch, rows: TensorDict) -> Decisions:
        index_T, answered_T = rows["turn_index"].values(), kept_tokens(rows)
        penalties_T = rows["kl_penalty"].values() if "kl_penalty" in rows else torch.zeros(len(index_T))
        if batch.critic_data.values_ERA is None:
            values_T = rows["values"].values() if "values" in rows else torch.zeros(len(index_T))
            return cls(rows, index_T[answered_T], values_T[answered_T], penalties_T[answered_T], of_tokens=True)
        cells_D, turn_T = index_T[answered_T].unique(return_inverse=True)
        penalties_D = torch.zeros(len(cells_D)).index_add(0, turn_T, penalties_T[answered_T])
        return cls(rows, cells_D, batch.critic_data.values_ERA.flatten()[cells_D], penalties_D, of_tokens=False)

    def rewards(self, rewards_ERA: Tensor) -> Tensor:
        """Rewards [D]: a turn's at its last decision, less every decision's penalty."""
        last_D = torch.ones_like(self.cells_D, dtype=torch.bool)
        last_D[:-1] = self.cells_D[1:] != self.cells_D[:-1]
        return torch.where(last_D, rewards_ERA.flatten()[self.cells_D], 0.0) - self.penalties_D

    def write(self, batch: JointBatch, advantages_D: Tensor, returns_D: Tensor | None = None) -> None:
        """Put advantages into the rows, returns beside the values."""
        answered_T = kept_tokens(self.rows)
        offsets = self.rows["turn_index"].offsets()

        def ragged(x_D: Tensor) -> Tensor:
            x_T = torch.zeros(len(answered_T)).masked_scatter(answered_T, x_D.float())
            return torch.nested.nested_tensor_from_jagged(x_T, offsets=offsets)

        if self.of_tokens:
            self.rows["advantages"] = ragged(advantages_D)
            if returns_D is not None:
                self.rows["returns"] = ragged(returns_D)
            return
        grid = torch.zeros(batch.spoken_ERA.numel()).index_put((self.cells_D,), advantages_D.float())
        self.rows["advantages"] = broadcast_to_tokens(grid, self.rows)
        if returns_D is not None:
            if batch.returns_ERA is None:
                batch.returns_ERA = torch.zeros(batch.spoken_ERA.shape)
            batch.returns_ERA.view(-1)[self.cells_D] = returns_D.float()


class Trajectories:
    """Lays decisions out in a matrix [N, T]: a trajectory a row, in the order in which they were taken."""

    def __init__(
        self,
        cells_D: Tensor,
        batch: JointBatch,
        separate_turns: bool,
        chain: bool = False,
    ) -> None:
        """Turns that are compared with their alternatives are trajectories of their own."""
        shape = batch.spoken_ERA.shape
        size, agents = shape.numel(), shape[-1]
        episode_D, _, agent_D = torch.unravel_index(cells_D, shape)
        seat_D = episode_D if chain else cells_D if separate_turns else episode_D * agents + agent_D
        seat_D = torch.where(batch.siblings_ERA.flatten()[cells_D] >= 0, size + cells_D, seat_D)
        order_D = torch.argsort(seat_D * size + cells_D, stable=True)  # cells rise with rounds, then with agents
        _, self.row_D = seat_D.unique(return_inverse=True)
        lengths_N = torch.bincount(self.row_D)
        starts_N = lengths_N.cumsum(0) - lengths_N
        self.column_D = torch.empty_like(order_D)
        self.column_D[order_D] = torch.arange(len(order_D)) - starts_N[self.row_D[order_D]]
        self.shape = (len(lengths_N), int(lengths_N.max()))
        self.first_D = torch.nonzero(self.column_D == 0)[:, 0][self.row_D[self.column_D == 0].argsort()]
        """The first decision of every trajectory."""
        self.mask_NT = self.to_matrix(torch.ones(len(cells_D)))
        self.cells_NT = self.to_matrix(cells_D)
        self.rounds_NT = torch.unravel_index(self.cells_NT, shape)[1]

    def to_matrix(self, x_D: Tensor) -> Tensor:
        return torch.zeros(self.shape, dtype=x_D.dtype).index_put((self.row_D, self.column_D), x_D)

    def from_matrix(self, x_NT: Tensor) -> Tensor:
        return x_NT[self.row_D, self.column_D]

    def discounts(self, gamma: float, token_gamma: float) -> Tensor:
        """The discount [N, T] from a decision to the next one of its trajectory: ``gamma`` for every round that lies between
        their turns, ``token_gamma`` between tokens of one turn."""
        rounds_NT = self.rounds_NT.diff(dim=1).clamp(min=0)  # below 0 beyond a trajectory's end, where nothing follows
        same_turn_NT = self.cells_NT.diff(dim=1) == 0
        discounts_NT = torch.where(same_turn_NT, token_gamma, torch.tensor(gamma, dtype=torch.float64) ** rounds_NT)
        return torch.nn.functional.pad(discounts_NT, (0, 1), value=1.0)

    def whitened(self, x_D: Tensor) -> Tensor:
        return self.from_matrix(whitened(self.to_matrix(x_D), self.mask_NT))


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and deviation 1, by verl's function; a single number is compared with nothing, and 0."""
    from verl.utils.torch_functional import masked_whiten  # heavy: a configuration is checked without it

    return masked_whiten(x, mask) if mask.sum() > 1 else torch.zeros_like(x)  # of a single one verl's would raise


def penalties(batch: JointBatch) -> Tensor:
    """KL penalty of each turn [E, R, A], summed over its tokens except rejected ones.

    A turn without one, untrained or rejected whole, gets the mean of its agent's turns in the same round of the task's samples, or
    of its alternatives. With 0 its group would take it for a turn that costs nothing.
    """
    penalties_ERA = torch.zeros(batch.spoken_ERA.shape)
    measured_ERA = torch.zeros(batch.spoken_ERA.shape, dtype=torch.bool)
    for rows in batch.rows.values():
        if "kl_penalty" in rows:
            index_T, kept_T = rows["turn_index"].values(), kept_tokens(rows)
            penalties_ERA.view(-1).index_add_(0, index_T[kept_T], rows["kl_penalty"].values()[kept_T])
            measured_ERA.view(-1)[index_T[kept_T]] = True
    missing_ERA = batch.spoken_ERA.bool() & ~measured_ERA
    if not measured_ERA.any() or not missing_ERA.any():
        return penalties_ERA
    return penalties_ERA + missing_ERA * group_means(penalties_ERA, measured_ERA, group_keys(batch, [*GroupKey]))


def returns(batch: JointBatch, credit_ERA: Tensor, kind: CreditKind, gamma: float) -> Tensor:
    """Return by which a turn is compared [E, R, A], less its KL penalty: its credit and, where that is a reward, the
    agent's later ones. A turn that is compared with its alternatives stands for itself."""
    rewards_ERA = credit_ERA - penalties(batch)
    if kind == "return":
        return rewards_ERA
    return batch.apart(returns_to_go(rewards_ERA, batch.mask_ERA, gamma), rewards_ERA)
