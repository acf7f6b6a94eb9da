"""Joint fit of utilities and mixer. The mixer stays in the driver: its derivatives with respect to the utilities go to the
critics' workers as coefficients of a linear loss, whose gradient equals that of one graph from the mixer to the value heads.
"""

import asyncio
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.batch.values import gradient_rows, place_utilities
from marl.learners.credit import explained_variance
from marl.learners.mixing import JointActions, Mixing, baseline_loss
from marl.types import CriticGroup, CriticName, Metrics

Critics = Mapping[CriticName, CriticGroup]


class MixerFit:
    """A mixer with its target copy and its optimiser; ``steps`` counts the training steps of the fit."""

    def __init__(self, make: Callable[[int], Mixing], num_agents: int, lr: float, seed: int) -> None:
        """The initial weights depend only on ``seed``, whatever else this process draws."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.mixing = make(num_agents)
        self.target, self.num_agents, self.steps = deepcopy(self.mixing), num_agents, 0
        parameters = list(self.mixing.parameters())
        self.optimizer = torch.optim.Adam(parameters, lr=lr) if parameters else None  # a sum has none

    async def begin(
        self, batch: JointBatch, critics: Critics, joint: JointActions, gamma: float, target_update_every: int
    ) -> Tensor:
        """Begin a training step: renew the target copies if they are due, and return the targets y [B] of Q_tot."""
        if self.steps % target_update_every == 0:
            self.target.load_state_dict(self.mixing.state_dict())
            await asyncio.gather(*(critic.renew_target() for critic in critics.values()))
        self.steps += 1
        if gamma == 0 or not (joint.next_B >= 0).any():
            return joint.rewards_B
        _, q_ERA = await read(batch, critics, target=True)
        with torch.no_grad():
            q_tot_B = self.target(joint.from_grid(q_ERA), self.target.states(joint))
        return joint.targets(q_tot_B, gamma)

    async def descend(
        self, batch: JointBatch, critics: Critics, joint: JointActions, targets_B: Tensor, last: bool
    ) -> dict[CriticName, Metrics]:
        """One optimiser step of the mixer and of every critic from the batch's values, which must be those of the current
        weights; afterwards the batch holds those of the new ones."""
        v_BA, q_BA = joint.from_grid(batch.critic_data.values_ERA), joint.from_grid(batch.critic_data.utilities_ERA)
        q_tot_B, dq_BA = self._descend(joint, q_BA, targets_B)
        v_loss, dv_BA = baseline_loss(v_BA, q_BA, joint.mask_BA)
        q_tot_loss = float((q_tot_B - targets_B).square().mean())
        fitted = {
            "q_tot_loss": q_tot_loss,
            "q_tot_explained_variance": explained_variance(q_tot_B, targets_B),
            "v_loss": float(v_loss),
            "loss": q_tot_loss + float(v_loss),  # in place of the critic's own, a sum of gradients times values
        }
        names, dv_ERA, dq_ERA = list(batch.critic_data.value_rows), joint.to_grid(dv_BA), joint.to_grid(dq_BA)
        rows = [gradient_rows(batch.critic_data.value_rows[name], dv_ERA, dq_ERA) for name in names]
        steps = (critics[name].descend(part, last) for name, part in zip(names, rows, strict=True))
        metrics = dict(zip(names, await asyncio.gather(*steps), strict=True))
        batch.critic_data.values_ERA, batch.critic_data.utilities_ERA = await read(batch, critics)
        return {name: numbers | fitted for name, numbers in metrics.items()}

    def _descend(self, joint: JointActions, q_BA: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the mixer on the mean of (Q_tot - y)^2. Returns Q_tot before the step and the loss's derivatives [B, A]
        with respect to the utilities."""
        q_BA = q_BA.detach().requires_grad_()
        q_tot_B = self.mixing(q_BA, self.mixing.states(joint))
        loss = (q_tot_B - targets_B).square().mean()
        dq_BA, *gradients = torch.autograd.grad(loss, [q_BA, *self.mixing.parameters()])
        if self.optimizer is not None:
            for parameter, gradient in zip(self.mixing.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
        return q_tot_B.detach(), dq_BA

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_agents": self.num_agents, "steps": self.steps}
        state |= {"mixing": self.mixing.state_dict(), "target": self.target.state_dict()}
        return state | ({"optimizer": self.optimizer.state_dict()} if self.optimizer else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.mixing.load_state_dict(state["mixing"])
        self.target.load_state_dict(state["target"])
        if self.optimizer is not None:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(state["optimizer"])
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # the configuration's, which a resumed run may change


async def read(batch: JointBatch, critics: Critics, target: bool = False) -> tuple[Tensor, Tensor]:
    """v and q [E, R, A] of the trained turns, under the critics' current weights or their target's."""
    names = list(batch.critic_data.value_rows)
    calls = [critics[name].compute_targets if target else critics[name].compute_values for name in names]
    results = await asyncio.gather(
        *(call(batch.critic_data.value_rows[name]) for call, name in zip(calls, names, strict=True))
    )
    v_ERA, q_ERA = torch.zeros(2, *batch.spoken_ERA.shape).unbind()
    for name, values in zip(names, results, strict=True):
        place_utilities(batch.critic_data.value_rows[name], values, v_ERA, q_ERA)
    return v_ERA, q_ERA
