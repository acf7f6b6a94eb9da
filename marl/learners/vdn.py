"""VDN: the team's value is the sum of the agents' utilities, fitted to the team's return (arXiv:1706.05296).

A utility q(h, y) is the value head's output after a turn's answer; its output before the answer is v(h), the mean of q.
Advantages are the answer's gain for the team beyond that. Training is on-policy, without a replay buffer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import II

from marl.batch.critic_spec import UtilityCritics
from marl.batch.joint import JointBatch
from marl.learners.base import Learner, register_learner
from marl.learners.credit_schemes import Credit
from marl.learners.mixer_fit import MixerFit
from marl.learners.mixing import Advantage, JointActions, Mixing
from marl.learners.trajectories import Decisions, penalties, whitened
from marl.modules.mixers import VDNMixer
from marl.types import CriticGroup, CriticName, Metrics
from marl.utils.numbers import SHARE, bounded, count


@register_learner("vdn")
class VDN(Learner):
    default_credit = "team"
    credits = ("team",)
    joint_actions = True

    @dataclass
    class Config(Learner.Config):
        gamma: float = bounded(II("algorithm.gamma"), SHARE)
        """Discount by rounds."""
        seed: int = bounded(II("seed"), count(0))
        """Seed of the mixer's initial weights."""
        advantage: Advantage = Advantage.gradient
        whiten: bool = True
        """Advantages of a policy's batch get mean 0 and deviation 1."""
        share_utilities: bool = False
        """One utility network for all agents, which differ by observation; false: one for every trained policy."""
        mixer_epochs: int = bounded(8, count(1, 10**4))
        """Passes over a step's turns, each one optimiser step after a forward of its own. What the fit knows of the step's
        own answers is most of the signal while utilities say little about answers they have not met."""
        mixer_lr: float = bounded(1e-3, SHARE)
        """Adam's learning rate for the mixer and the encoder of its state."""
        target_update_every: int = bounded(10, count())
        """Steps between renewals of the target copies of utilities and mixer."""

    config: Config

    def __init__(self, config: Config, credit: Credit) -> None:
        super().__init__(config, credit)
        self._fit: MixerFit | None = None

    @property
    def compares_samples(self) -> bool:
        return self.config.advantage is Advantage.group

    @property
    def critics(self) -> UtilityCritics:
        return UtilityCritics(self.config.share_utilities)

    def make_mixing(self, num_agents: int) -> Mixing:
        return Mixing(VDNMixer())

    def fit(self, num_agents: int) -> MixerFit:
        """Made with the first batch, which tells how many agents there are."""
        if self._fit is None:
            self._fit = MixerFit(self.make_mixing, num_agents, self.config.mixer_lr, self.config.seed)
        return self._fit

    def joint(self, batch: JointBatch) -> JointActions:
        rewards_ER = self.credit.of_team(batch) - penalties(batch).sum(-1)
        return JointActions.of(batch, rewards_ER, self.config.gamma)

    def assign_credit(self, batch: JointBatch) -> Metrics:
        if not batch.rows:  # nobody is trained in this step, and nothing was read
            return {}
        joint, mixing = self.joint(batch), self.fit(len(batch.agents)).mixing
        v_BA, q_BA = joint.from_grid(batch.critic_data.values_ERA), joint.from_grid(batch.critic_data.utilities_ERA)
        credit_ERA = joint.to_grid(mixing.advantages(self.config.advantage, joint, q_BA, v_BA))
        for rows in batch.rows.values():
            decisions = Decisions.of(batch, rows)
            credit_D = credit_ERA.flatten()[decisions.cells_D]
            decisions.write(batch, whitened(credit_D, torch.ones_like(credit_D)) if self.config.whiten else credit_D)
        return {}

    async def update_critics(
        self, batch: JointBatch, critics: Mapping[CriticName, CriticGroup]
    ) -> dict[CriticName, Metrics]:
        """Fit utilities and mixer to y = r + gamma Q_tot of the next round, and v to q; the batch has their new values."""
        if not batch.critic_data.value_rows:
            return {}
        config, fit, joint = self.config, self.fit(len(batch.agents)), self.joint(batch)
        targets_B = await fit.begin(batch, critics, joint, config.gamma, config.target_update_every)
        for left in reversed(range(config.mixer_epochs)):
            metrics = await fit.descend(batch, critics, joint, targets_B, last=left == 0)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self._fit is None else self._fit.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return  # saved before the first fit
        fitted = MixerFit(self.make_mixing, state.get("num_agents", 1), self.config.mixer_lr, self.config.seed)
        self.expect_state(state, fitted.state_dict())
        fitted.load_state_dict(state)
        self._fit = fitted
