"""VDN: the team's value is the sum of the agents' utilities, fitted to the team's return (arXiv:1706.05296).

A utility is what a value head says of a turn after its answer, q(h, y); before the answer it says v(h), the mean of q.
Actors are paid by what an answer is worth to the team beyond that. On-policy: there is no replay buffer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from omegaconf import II
from torch import Tensor
from verl.utils.torch_functional import masked_whiten

from marl.learners.base import Learner, register_learner
from marl.learners.credit import team_mean
from marl.learners.decisions import Decisions, penalties
from marl.learners.mixing import JointActions, Mixing, by_gradient, by_group
from marl.learners.schemes import Credit
from marl.learners.utilities import MixerFit, read
from marl.modules.mixers import VDNMixer
from marl.types import CriticGroup, CriticName, JointBatch, Metrics


class Advantage(Enum):
    gradient = "gradient"
    """w_i (q_i - v_i) with w_i = dQ_tot / dq_i (DOP, arXiv:2007.12322)."""
    group = "group"
    """Q_tot less its mean with the agent's answers in the task's other samples instead of its own."""


@register_learner("vdn")
class VDN(Learner):
    critic = "utility"
    default_credit = "team"
    credits = ("team",)
    fits_first = True
    """A utility that has not met an answer credits it with noise, which would be whitened up to the size of a signal."""

    @dataclass
    class Config(Learner.Config):
        gamma: float = II("algorithm.gamma")
        seed: int = II("seed")
        """Of the mixer's first weights."""
        advantage: Advantage = Advantage.gradient
        whiten: bool = True
        """Advantages of a policy's batch get mean 0 and deviation 1."""
        share_utilities: bool = False
        """One utility network for all agents, told apart by what they are shown; false: one for every trained policy."""
        mixer_epochs: int = 4
        """Passes over a step's turns, each one optimiser step after a forward of its own."""
        mixer_lr: float = 1e-3
        """Of Adam, for the mixer and the encoder of its state."""
        target_update_every: int = 10
        """Steps between renewals of the target copies of utilities and mixer."""

    config: Config

    def __init__(self, config: Config, credit: Credit) -> None:
        super().__init__(config, credit)
        self.compares_samples = config.advantage is Advantage.group
        self._fit: MixerFit | None = None

    def make_mixing(self, num_agents: int) -> Mixing:
        return Mixing(VDNMixer())

    def fit(self, num_agents: int) -> MixerFit:
        """Made with the first batch, which tells how many agents there are."""
        if self._fit is None:
            self._fit = MixerFit(self.make_mixing, num_agents, self.config.mixer_lr, self.config.seed)
        return self._fit

    def joint(self, batch: JointBatch) -> JointActions:
        rewards_ER = team_mean(self.credit.of(batch), batch.path().mask_ERA) - penalties(batch).sum(-1)
        return JointActions.of(batch, rewards_ER, self.config.gamma)

    def assign_credit(self, batch: JointBatch) -> Metrics:
        joint, mixing = self.joint(batch), self.fit(len(batch.agents)).mixing
        v_BA, q_BA = joint.take(batch.values_ERA), joint.take(batch.utilities_ERA)
        state_BS = mixing.states(joint).detach()
        if self.config.advantage is Advantage.group:
            credit_BA = by_group(mixing, q_BA, joint.mask_BA, state_BS, joint.keys_B)
        else:
            credit_BA = by_gradient(mixing, q_BA, v_BA, state_BS)
        credit_ERA = joint.lay(credit_BA)
        for rows in batch.rows.values():
            decisions = Decisions.of(batch, rows)
            credit_D = credit_ERA.flatten()[decisions.cells_D]
            decisions.write(batch, whitened(credit_D) if self.config.whiten else credit_D)
        return {}

    async def update_critics(
        self, batch: JointBatch, critics: Mapping[CriticName, CriticGroup]
    ) -> dict[CriticName, Metrics]:
        """Fit utilities and mixer to y = r + gamma Q_tot of the next round, and v to q; the batch has their new values."""
        if not batch.value_rows:
            return {}
        config, fit, joint = self.config, self.fit(len(batch.agents)), self.joint(batch)
        if fit.steps % config.target_update_every == 0:
            await fit.renew_targets(critics)
        fit.steps += 1
        targets_B = await fit.targets(batch, critics, joint, config.gamma)
        for left in reversed(range(config.mixer_epochs)):
            metrics = await fit.one_pass(batch, critics, joint, targets_B, last=left == 0)
            batch.values_ERA, batch.utilities_ERA = await read(batch, critics)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self._fit is None else self._fit.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.fit(state["num_agents"]).load_state_dict(state)


def whitened(x_D: Tensor) -> Tensor:
    """Mean 0 and deviation 1; a single number is compared with nothing, and 0."""
    return masked_whiten(x_D, torch.ones_like(x_D)) if len(x_D) > 1 else torch.zeros_like(x_D)
