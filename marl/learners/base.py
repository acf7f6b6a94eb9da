"""A learner turns scores into advantages and decides in which order policies are updated.

It sees turn grids, ragged rows and a small protocol of worker groups; never Ray, a server, a tokenizer or a file.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from marl.batch.critic_spec import CriticSpec
from marl.batch.joint import JointBatch
from marl.batch.values import training_rows
from marl.learners.credit_schemes import Credit
from marl.types import AgentId, CriticGroup, CriticName, Metrics, PolicyGroup, PolicyName
from marl.utils.metrics import RunningMean
from marl.utils.registry import Registry

if TYPE_CHECKING:
    from tensordict import TensorDict


class Learner(ABC):
    """Override :meth:`assign_credit`; override :meth:`update` only if policies are not updated alike.

    Facts about a learner are class attributes, so that nothing branches on its name.
    """

    reads_joint: ClassVar[bool] = False
    """Wants ``JointBatch.critic_data.joint_ids``."""
    joint_actions: ClassVar[bool] = False
    """Works on joint actions, which exclude the alternatives to a single agent's turn."""
    needs_exact_log_probs: ClassVar[bool] = False
    """Compares log-probs that it asks for with ``old_log_probs``, which therefore must be of the same forward pass."""
    default_credit: ClassVar[str] = "own"
    """Credit scheme that ``credit=auto`` selects."""
    credits: ClassVar[tuple[str, ...]] = ()
    """The credit schemes that it is defined for; empty for all."""

    @dataclass
    class Config:
        name: str
        train_rounds: list[int] | None = None
        """Rounds whose turns are trained; null for all."""

    def __init__(self, config: Config, credit: Credit) -> None:
        self.config, self.credit = config, credit
        self.running_means: dict[str, RunningMean] = {}
        """Means over all steps so far; the summary shows them, checkpoints keep them."""

    def follow(self, name: str, value: float) -> None:
        """Add a step's value to the running mean of this name."""
        self.running_means.setdefault(name, RunningMean()).add(value)

    def summary(self) -> Metrics:
        """The learner's own numbers in ``summary.json``."""
        return {name: mean.mean for name, mean in self.running_means.items() if mean.mean is not None}

    @property
    def compares_samples(self) -> bool:
        """True if it learns from differences between a task's samples, and therefore needs more than one of them."""
        return False

    @property
    def weighs_turns(self) -> bool:
        """True if it compares turns of several rounds, and a long conversation counts more than a short one."""
        return False

    @property
    def critics(self) -> CriticSpec | None:
        """The critics that value its turns; None for a learner without any. A class attribute where no option matters."""
        return None

    @property
    def fits_first(self) -> bool:
        """Its critics are fitted before they credit a step's turns; else while the policies are updated."""
        return self.critics is not None and self.critics.fits_first

    @property
    def exchange_every(self) -> int:
        """After how many steps the agents exchange their policies; 0 for never."""
        return 0

    @classmethod
    def estimators(cls) -> list[str]:
        """Allowed values of ``algorithm.adv_estimator``; null is the learner's own."""
        return []

    def check(self, policies: Mapping[AgentId, Sequence[PolicyName]]) -> None:
        """Raise ValueError where it cannot train these agents, each with its policies of rounds 1, 2, …"""
        return None

    @abstractmethod
    def assign_credit(self, batch: JointBatch) -> Metrics:
        """Write ``advantages``, ragged like ``response_mask``, into the rows of every policy."""

    def degenerate_share(self, metrics: Metrics) -> float | None:
        """The share of degenerate groups in a step, from :meth:`assign_credit`'s metrics; None without groups."""
        return None

    async def update(self, batch: JointBatch, policies: Mapping[PolicyName, PolicyGroup]) -> dict[PolicyName, Metrics]:
        """Update every policy that has rows, all at the same time."""
        names = [name for name in batch.rows if name in policies]
        results = await asyncio.gather(*(policies[name].update_actor(batch.rows[name]) for name in names))
        return dict(zip(names, results, strict=True))

    async def update_critics(
        self, batch: JointBatch, critics: Mapping[CriticName, CriticGroup]
    ) -> dict[CriticName, Metrics]:
        """Fit every critic to the returns of the rows that it read, once, all at the same time."""
        names = [name for name in batch.critic_data.value_rows if name in critics]
        results = await asyncio.gather(*(critics[name].update_critic(training_rows(batch, name)) for name in names))
        return dict(zip(names, results, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """State between steps, for checkpoints: tensors, numbers and strings, and dicts and lists of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave. Raises ValueError for the state of another learner."""
        self.expect_state(state, ())

    def expect_state(self, state: Mapping[str, Any], keys: Collection[str], optional: Collection[str] = ()) -> None:
        """Raise ValueError unless a state has these keys and, beside the optional ones, no others."""
        if set(keys) <= set(state) <= {*keys, *optional}:
            return
        raise ValueError(
            f"learner={self.config.name}: the saved state holds {', '.join(sorted(state)) or 'nothing'}, expected "
            f"{', '.join(sorted(keys)) or 'nothing'}: another learner saved it; resume with that learner, or start a new run"
        )


def broadcast_to_tokens(x_ERA: Tensor, rows: "TensorDict") -> Tensor:
    """Carry numbers of turns to the tokens of those turns, ragged like ``turn_index``; 0 elsewhere."""
    index = rows["turn_index"]
    values = x_ERA.flatten()[index.values().clamp(min=0)]
    values = torch.where(index.values() >= 0, values, 0.0).float()
    return torch.nested.nested_tensor_from_jagged(values, offsets=index.offsets())


LEARNERS: Registry[Learner] = Registry("learner")
register_learner = LEARNERS.register
