"""Credit schemes: how verdicts on turns become rewards of turns. A choice apart from the learner (``credit=<name>``)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import torch
from hydra.core.config_store import ConfigStore
from torch import Tensor

from marl.learners import credit
from marl.types import JointBatch
from marl.utils.registry import Registry

CreditKind = Literal["reward", "return", "advantage"]


class Credit(ABC):
    """Override :meth:`assign`."""

    kind: ClassVar[CreditKind]
    """``reward``: the learner adds an agent's later rounds. ``return``: the future is inside already.
    ``advantage``: goes to the loss as it is."""
    votes: ClassVar[bool] = False
    """Asks for what the teams decided on (``JointBatch.ballots``)."""
    replays: ClassVar[bool] = False
    """Asks for what would have become of other answers (``JointBatch.outcomes_ERAK``)."""
    compares_samples: ClassVar[bool] = False
    """Compares a task's samples, and therefore needs more than one of them."""

    @dataclass
    class Config:
        name: str
        alpha0: float = 0.0
        """Incentive to draw a right answer out of wrong peers. Paid on top of the credit, as the three below; may be negative."""
        alpha1: float = 0.0
        """Incentive to be persuaded by right peers."""
        beta0: float = 0.0
        """Incentive to help the peers with a wrong answer."""
        beta1: float = 0.0
        """Incentive to persuade the peers of a right answer."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def assign(self, batch: JointBatch) -> Tensor:
        """Credit [E, R, A] of every turn of the conversations, zero where nobody spoke."""

    def of(self, batch: JointBatch) -> Tensor:
        """Credit [E, R, A] of every turn. One that is compared with its alternatives is worth its own verdict: what came
        after the kept one is not theirs to share."""
        path, config = batch.path(), self.config
        credit_ERA = self.assign(path)
        alpha, beta = (config.alpha0, config.alpha1), (config.beta0, config.beta1)
        if any(alpha + beta):
            credit_ERA = credit_ERA + credit.incentives(path.verdicts_ERA, path.mask_ERA, alpha, beta)
        if batch.siblings_ERA is None or self.kind == "advantage":
            return credit_ERA
        return torch.where(batch.siblings_ERA >= 0, batch.verdicts_ERA, credit_ERA)


CREDITS: Registry[Credit] = Registry("credit")
register_credit = CREDITS.register


# what ``credit=auto`` becomes is the learner's to say (marl.main.prepare)
ConfigStore.instance().store(group="credit", name="auto", node=Credit.Config(name="auto"))


@register_credit("own")
class Own(Credit):
    """A turn's reward is the verdict on it."""

    kind = "reward"

    def assign(self, batch: JointBatch) -> Tensor:
        return batch.verdicts_ERA * batch.mask_ERA


class TeamOf(Enum):
    round = "round"
    """The mean verdict of the agents that spoke in the same round."""
    final = "final"
    """The mean verdict of the episode's last round, for all its rounds."""
    answer = "answer"
    """The verdict on the team's answer, as the runner decided it, for all rounds."""


@register_credit("team")
class Team(Credit):
    """All agents get the same reward, of the round or of the whole episode."""

    kind = "reward"

    @dataclass
    class Config(Credit.Config):
        of: TeamOf = TeamOf.round

    config: Config

    def assign(self, batch: JointBatch) -> Tensor:
        mask_ERA = batch.mask_ERA.to(batch.verdicts_ERA.dtype)
        team_ER = credit.team_mean(batch.verdicts_ERA, mask_ERA)
        if self.config.of is TeamOf.final:
            team_ER = credit.last_round(team_ER, mask_ERA)[:, None]
        elif self.config.of is TeamOf.answer:
            team_ER = batch.team_verdict_E[:, None]
        return team_ER[:, :, None] * mask_ERA


@register_credit("mixed")
class Mixed(Team):
    """A turn's own verdict and, with a weight, the team's reward (AT-GRPO, arXiv:2510.11062)."""

    @dataclass
    class Config(Team.Config):
        weight: float = 1.0
        """Of the team's part."""

    config: Config

    def assign(self, batch: JointBatch) -> Tensor:
        return batch.verdicts_ERA * batch.mask_ERA + self.config.weight * super().assign(batch)


@register_credit("joint")
class Joint(Credit):
    """Every turn of an episode gets the sum of the verdicts on all of them (CORY, arXiv:2410.06101)."""

    kind = "return"

    def assign(self, batch: JointBatch) -> Tensor:
        mask_ERA = batch.mask_ERA.to(batch.verdicts_ERA.dtype)
        return (batch.verdicts_ERA * mask_ERA).sum((1, 2), keepdim=True) * mask_ERA


@register_credit("zero_sum")
class ZeroSum(Credit):
    """What one side wins the others lose: at an agent's last turn, its verdict less the mean of the others' last ones.

    With two sides the rewards of an episode sum to 0 (SPIRAL, arXiv:2506.24119). 0 where nobody else spoke. An episode that
    ended before its time is no draw: all sides lose it, as if the others had been right.
    """

    kind = "reward"

    def assign(self, batch: JointBatch) -> Tensor:
        mask_ERA = batch.mask_ERA.to(batch.verdicts_ERA.dtype)
        last_ERA = mask_ERA * (mask_ERA.flip(1).cumsum(1).flip(1) == 1)
        final_EA, spoke_EA = (batch.verdicts_ERA * last_ERA).sum(1), last_ERA.sum(1)
        others_EA = spoke_EA.sum(-1, keepdim=True) - spoke_EA
        lost_EA = (final_EA.sum(-1, keepdim=True) - final_EA) / others_EA.clamp(min=1)
        if batch.failed_E is not None:
            lost_EA = torch.where(batch.failed_E[:, None], 1.0, lost_EA)
        return ((final_EA - lost_EA) * (others_EA > 0))[:, None, :] * last_ERA


@register_credit("influence")
class Influence(Credit):
    """The influence-aware reward of MAPoRL (arXiv:2502.18439); see :func:`marl.learners.credit.influence`."""

    kind = "return"

    @dataclass
    class Config(Credit.Config):
        gamma: float = 0.3
        """Weight of the next round's team verdict; the paper's value. 1 weighs all rounds alike."""

    config: Config

    def assign(self, batch: JointBatch) -> Tensor:
        return credit.influence(batch.verdicts_ERA, batch.mask_ERA, self.config.gamma)
