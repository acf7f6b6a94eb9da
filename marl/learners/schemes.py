"""Credit schemes: how verdicts on turns become rewards of turns. A choice apart from the learner (``credit=<name>``)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

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

    @dataclass
    class Config:
        name: str

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def assign(self, batch: JointBatch) -> Tensor:
        """Credit [E, R, A] of every turn, zero where nobody spoke."""


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
