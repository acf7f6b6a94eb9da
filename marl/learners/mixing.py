"""Agents' utilities and the team's mixed value: the mathematics of VDN and QMIX, run in the driver. Pure except for the modules.

A *joint action* is what the trained agents say in one round of one episode. Axes: B joint actions, A agents, S the state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.modules.mixers import StateEncoder


class Advantage(Enum):
    gradient = "gradient"
    """w_i (q_i - v_i) with w_i = dQ_tot / dq_i (DOP, arXiv:2007.12322)."""
    group = "group"
    """Q_tot less its mean over the agent's answers in the task's other samples, substituted for this one."""


Mix = Callable[[Tensor, Tensor], Tensor]
"""Utilities [B, A] and states [B, S] to Q_tot [B]."""


class Mixing(nn.Module):
    """A mixer and, if it reads a state, the encoder that produces it; both are trained together."""

    def __init__(self, mixer: nn.Module, encoder: StateEncoder | None = None) -> None:
        super().__init__()
        self.mixer, self.encoder = mixer, encoder

    def states(self, joint: JointActions) -> Tensor:
        """[B, S]; S is 0 for a mixer without a state. Raises ValueError if it reads one and there are no ids."""
        if self.encoder is None:
            return torch.zeros(len(joint.index_B), 0)
        if joint.ids is None:
            raise ValueError("the mixer reads the joint observation, but the batch holds no joint_ids")
        return self.encoder(joint.ids)[joint.index_B]

    def advantages(self, how: Advantage, joint: JointActions, q_BA: Tensor, v_BA: Tensor) -> Tensor:
        """Per-agent advantages [B, A]."""
        state_BS = self.states(joint).detach()
        if how is Advantage.group:
            return by_group(self, q_BA, joint.mask_BA, state_BS, joint.keys_B)
        return by_gradient(self, q_BA, v_BA, state_BS)

    def forward(self, q_BA: Tensor, state_BS: Tensor) -> Tensor:
        return self.mixer(q_BA, state_BS)


@dataclass
class JointActions:
    """The joint actions of a step, in the order of episodes and rounds. Untrained agents have utility 0 in them."""

    shape: torch.Size
    """Shape [E, R, A] of the turn grids."""
    index_B: Tensor
    """Index of each joint action in the flattened [E, R] grid."""
    mask_BA: Tensor
    """1 where a trained agent speaks, even if this turn is left out of training."""
    next_B: Tensor
    """The episode's next joint action, -1 after its last."""
    rounds_B: Tensor
    """Number of rounds from it to the next one."""
    rewards_B: Tensor
    """The team's reward up to the next joint action."""
    keys_B: list[Hashable]
    """Task and round: joint actions with the same key are alternatives to one another."""
    ids: Tensor | None
    """Ids of the joint observation, ragged over [E * R]."""

    @classmethod
    def of(cls, batch: JointBatch, rewards_ER: Tensor, gamma: float) -> JointActions:
        """``rewards_ER``: the team's reward of every round. Alternatives that no conversation followed are excluded."""
        spoke_ERA = batch.mask_ERA
        trained_ERA = batch.compared_ERA & spoke_ERA
        trained_ER = trained_ERA.any(-1)
        folded_ER = credit.fold_untrained(
            rewards_ER[..., None], spoke_ERA.any(-1, keepdim=True), trained_ER[..., None], gamma
        )[..., 0]
        episode_B, round_B = trained_ER.nonzero(as_tuple=True)
        number_B = torch.arange(len(episode_B))
        same_B = torch.cat([episode_B[1:] == episode_B[:-1], torch.zeros(1, dtype=torch.bool)])[: len(episode_B)]
        next_B = torch.where(same_B, number_B + 1, -1)
        return cls(
            shape=batch.spoken_ERA.shape,
            index_B=episode_B * trained_ER.shape[1] + round_B,
            mask_BA=trained_ERA[episode_B, round_B],
            next_B=next_B,
            rounds_B=torch.where(same_B, round_B[next_B] - round_B, 0),
            rewards_B=folded_ER[episode_B, round_B].float(),  # the mixer is of single precision
            keys_B=[(batch.tasks_E[e], r) for e, r in zip(episode_B.tolist(), round_B.tolist(), strict=True)],
            ids=batch.critic_data.joint_ids,
        )

    def from_grid(self, x_ERA: Tensor | None) -> Tensor:
        """A grid's values at the joint actions [B, A], 0 for agents that are silent or untrained."""
        if x_ERA is None:
            raise ValueError("the batch holds no utilities: no critic has evaluated it")
        return x_ERA.reshape(-1, self.shape[-1])[self.index_B] * self.mask_BA

    def to_grid(self, x_BA: Tensor) -> Tensor:
        """The grid [E, R, A] of these values, 0 elsewhere."""
        x_ERA = torch.zeros(self.shape)
        x_ERA.view(-1, self.shape[-1])[self.index_B] = (x_BA * self.mask_BA).float()
        return x_ERA

    def targets(self, q_tot_B: Tensor, gamma: float) -> Tensor:
        """y = r + gamma^k Q_tot of the episode's next joint action, k rounds later; 0 after the last."""
        return self.rewards_B + gamma**self.rounds_B * torch.where(self.next_B >= 0, q_tot_B[self.next_B], 0.0)


def by_gradient(mix: Mix, q_BA: Tensor, v_BA: Tensor, state_BS: Tensor) -> Tensor:
    """w_i (q_i - v_i) with w_i = dQ_tot / dq_i (DOP, arXiv:2007.12322): the answer's value to the team, above the mean
    of its agent's answers. A mixer may scale utilities arbitrarily, so a raw one cannot serve as credit."""
    with torch.enable_grad():
        q_BA = q_BA.detach().requires_grad_()
        (weights_BA,) = torch.autograd.grad(mix(q_BA, state_BS.detach()).sum(), q_BA)
    return weights_BA * (q_BA.detach() - v_BA)


@torch.no_grad()
def by_group(mix: Mix, q_BA: Tensor, mask_BA: Tensor, state_BS: Tensor, keys_B: list[Hashable]) -> Tensor:
    """Q_tot(q) - mean_k Q_tot(q_-i, q_i^k) over the agent's other answers k with the same key; 0 if it gave no others."""
    pairs_P2 = pairs_within(keys_B)
    q_tot_B = mix(q_BA, state_BS)
    credit_BA = torch.zeros_like(q_BA)
    for a in range(q_BA.shape[1]):
        own_P, other_P = pairs_P2[mask_BA[pairs_P2].all(1)[:, a]].unbind(1)
        changed_PA = q_BA[own_P]
        changed_PA[:, a] = q_BA[other_P, a]
        count_B = torch.bincount(own_P, minlength=len(q_BA))
        sum_B = torch.zeros_like(q_tot_B).index_add(0, own_P, mix(changed_PA, state_BS[own_P]))
        credit_BA[:, a] = torch.where(count_B > 0, q_tot_B - sum_B / count_B.clamp(min=1), 0.0)
    return credit_BA


def pairs_within(keys_B: list[Hashable]) -> Tensor:
    """All ordered pairs [P, 2] of different entries with the same key."""
    index_B, count_G = credit.group_index(keys_B)
    members = index_B.argsort(stable=True).split(count_G.tolist())
    pairs_P2 = torch.cat([torch.cartesian_prod(group, group).view(-1, 2) for group in members])
    return pairs_P2[pairs_P2[:, 0] != pairs_P2[:, 1]]


def baseline_loss(v_BA: Tensor, q_BA: Tensor, mask_BA: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over turns of (v - q)^2, in which q is the target, and its derivatives [B, A] with respect to v."""
    error_BA = (v_BA - q_BA) * mask_BA
    turns = mask_BA.sum().clamp(min=1)
    return error_BA.square().sum() / turns, 2 * error_BA / turns
