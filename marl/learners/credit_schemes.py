"""Credit schemes: rewards of turns from their scores. Chosen independently of the learner (``credit=<name>``)."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import torch
from hydra.core.config_store import ConfigStore
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.envs.games import LEAD
from marl.learners import credit
from marl.learners.extra_rollouts import Gathered, Rollouts
from marl.types import Episode
from marl.utils.masks import last_along
from marl.utils.numbers import FINITE, SHARE, bounded
from marl.utils.registry import Registry

CreditKind = Literal["reward", "return", "advantage"]


INCENTIVES = ("alpha0", "alpha1", "beta0", "beta1")
"""Keys of a credit's incentives."""


class Credit(ABC):
    """Override :meth:`assign`."""

    kind: ClassVar[CreditKind]
    """``reward``: the learner adds an agent's later rounds. ``return``: the future is inside already.
    ``advantage``: goes to the loss as it is."""
    votes: ClassVar[bool] = False
    """Needs a runner whose teams vote."""
    compares_samples: ClassVar[bool] = False
    """Compares a task's samples, and therefore needs more than one of them."""
    own_scores: ClassVar[bool] = False
    """Credits an answer only with its own score, as required for turns that are compared with their alternatives."""
    sums_to_zero: ClassVar[bool] = False
    """The agents' credits sum to zero in every episode, and so does their mean."""

    @dataclass
    class Config:
        name: str
        alpha0: float = bounded(0.0, FINITE)
        """Incentive to reach a right answer from wrong peers. Added to the credit, like the three below; may be negative."""
        alpha1: float = bounded(0.0, FINITE)
        """Incentive to be persuaded by right peers."""
        beta0: float = bounded(0.0, FINITE)
        """Incentive to help the peers with a wrong answer."""
        beta1: float = bounded(0.0, FINITE)
        """Incentive to persuade the peers of a right answer."""

        @property
        def has_incentives(self) -> bool:
            return any(getattr(self, key) for key in INCENTIVES)

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def reads_turn_scores(self) -> bool:
        """True if the score of a single turn enters its credit."""
        return not self.votes and self.kind != "advantage"

    def gather(self, episodes: Sequence[Episode], rollouts: Rollouts) -> Awaitable[Gathered] | None:
        """Run further rollouts for evidence beyond the scored episodes, while the servers are still up; None if none is
        needed. An override may be ``async``. It stores numbers in ``turn.evidence``."""
        return None

    def add_evidence(self, batch: JointBatch, episodes: Sequence[Episode], no_answer: float = 0.0) -> None:
        """Put into the batch what :meth:`assign` needs of the episodes beyond grids; ``no_answer``: score of no answer."""
        return None

    @property
    def adds_answers(self) -> bool:
        """True if an agent's return is the sum of scores of all its answers, so that a longer conversation earns more. A
        class attribute where no option matters."""
        return False

    @abstractmethod
    def assign(self, batch: JointBatch) -> Tensor:
        """Credit [E, R, A] of every turn of the conversations, zero where no agent spoke."""

    def of(self, batch: JointBatch) -> Tensor:
        """Credit [E, R, A] of every turn. One that is compared with its alternatives gets only its own score: later
        rounds followed from the kept one."""
        credit_ERA = self.assign(batch)
        if self.config.has_incentives:
            credit_ERA = credit_ERA + self.incentives(batch)
        return credit_ERA if self.kind == "advantage" else batch.apart(credit_ERA, batch.scores_ERA)

    def of_team(self, batch: JointBatch) -> Tensor:
        """The team's reward [E, R] of every round, for learners to which the team is one decision maker."""
        return credit.team_mean(self.of(batch), batch.mask_ERA)

    def incentives(self, batch: JointBatch) -> Tensor:
        """Incentives [E, R, A] of every turn. Turns that are not answers get none and do not count as peers', nor does the
        last turn before an early end, whose score is the failure score. Penalties are ignored: an overlong answer may be right."""
        config = self.config
        alpha, beta = (config.alpha0, config.alpha1), (config.beta0, config.beta1)
        return credit.incentives(batch.scores_ERA + batch.penalties_ERA, standing(batch), alpha, beta)


CREDITS: Registry[Credit] = Registry("credit")
register_credit = CREDITS.register


# what ``credit=auto`` becomes is the learner's to say (marl.preflight.prepare.prepare)
ConfigStore.instance().store(group="credit", name="auto", node=Credit.Config(name="auto"))


class OutcomeCredit(Credit):
    """Credit with a part, the outcome, that is known only at the conversation's end. An agent gets it once, at its last
    turn, however often it spoke; the team once, in its last round. Override :meth:`of_turns` and :meth:`outcome`."""

    kind = "reward"

    @abstractmethod
    def of_turns(self, batch: JointBatch) -> Tensor:
        """Rewards [E, R, A] that answers get in their own round."""

    @abstractmethod
    def outcome(self, batch: JointBatch) -> Tensor:
        """Rewards [E, A] that agents get at the end of the conversation."""

    def assign(self, batch: JointBatch) -> Tensor:
        return self.of_turns(batch) + self.outcome(batch)[:, None] * batch.last_turns_ERA

    def of_team(self, batch: JointBatch) -> Tensor:
        """The mean over the answers of a round; in the last one, the mean outcome of those that answered too, of all if nobody
        did."""
        answered_ERA = standing(batch)
        rewards_ERA = self.of_turns(batch)
        if self.config.has_incentives:
            rewards_ERA = rewards_ERA + self.incentives(batch)
        answered_EA, spoke_EA = batch.answered_ERA.any(1), batch.mask_ERA.any(1)
        counted_EA = torch.where(answered_EA.any(-1, keepdim=True), answered_EA, spoke_EA)
        outcome_E = credit.team_mean(self.outcome(batch), counted_EA)
        return credit.team_mean(rewards_ERA, answered_ERA) + credit.in_last_round(outcome_E, batch.mask_ERA)


def standing(batch: JointBatch) -> Tensor:
    """1 on the answers [E, R, A] that get their own scores. Each agent's last turn before an early end gets the failure
    score instead."""
    return batch.answered_ERA & ~(batch.failed_E[:, None, None] & batch.last_turns_ERA.bool())


def forfeits(batch: JointBatch) -> Tensor:
    """Score [E, A] of each agent's last turn. Before an early end that is the failure score, or what the runner has for the agent,
    such as a game's ``invalid``; the team's score would count a game's earlier payoffs again. A turn that is compared with its
    alternatives has a score of its own, and counts as the team's."""
    last_ERA = batch.apart(batch.scores_ERA, batch.team_score_E[:, None, None])
    return (last_ERA * batch.last_turns_ERA).sum(1)


def unanswered(batch: JointBatch) -> Tensor:
    """The team's score [E, A] for agents that gave no answer to the task, else 0; their forfeits where the conversation ended
    early."""
    team_EA = ~batch.answered_ERA.any(1) * batch.team_score_E[:, None]
    return torch.where(batch.failed_E[:, None], forfeits(batch), team_EA)


@register_credit("own")
class Own(OutcomeCredit):
    """An answer's reward is its score. Other turns have no reward of their own; an agent that never answers gets the
    team's score."""

    own_scores = True
    adds_answers = True

    def of_turns(self, batch: JointBatch) -> Tensor:
        return batch.scores_ERA * standing(batch)

    def outcome(self, batch: JointBatch) -> Tensor:
        return unanswered(batch)


class TeamOf(Enum):
    round = "round"
    """The mean score of the answers of the same round; an agent that never answers gets the team's score, once."""
    final = "final"
    """The mean score of the answers of the last round that has any, once."""
    answer = "answer"
    """The score of the team's answer, as the runner decided it, once."""


@register_credit("team")
class Team(OutcomeCredit):
    """All agents that answer in a round get the same reward for it, or all agents one for the whole episode. With
    ``round``, agents that never answer in the same round each get the scores of their own answers alone."""

    @dataclass
    class Config(OutcomeCredit.Config):
        of: TeamOf = TeamOf.round

    config: Config

    @property
    def adds_answers(self) -> bool:
        return self.config.of is TeamOf.round

    @property
    def reads_turn_scores(self) -> bool:
        return self.config.of is not TeamOf.answer

    def of_turns(self, batch: JointBatch) -> Tensor:
        answered_ERA = standing(batch)
        if self.config.of is not TeamOf.round:
            return torch.zeros_like(batch.scores_ERA)
        return credit.team_mean(batch.scores_ERA, answered_ERA)[..., None] * answered_ERA

    def outcome(self, batch: JointBatch) -> Tensor:
        if self.config.of is TeamOf.round:
            return unanswered(batch)
        team_E = batch.team_score_E
        if self.config.of is TeamOf.final:
            answered_ERA = batch.answered_ERA
            final_E = credit.last_round(credit.team_mean(batch.scores_ERA, answered_ERA), answered_ERA)
            team_E = torch.where(answered_ERA.any((1, 2)), final_E, team_E)
            team_E = torch.where(batch.failed_E, credit.team_mean(forfeits(batch), batch.mask_ERA.any(1)), team_E)
        return team_E[:, None].expand(-1, batch.mask_ERA.shape[2])


@register_credit("mixed")
class Mixed(Team):
    """A turn's own score and, with a weight, the team's reward (AT-GRPO, arXiv:2510.11062)."""

    adds_answers = True

    @dataclass
    class Config(Team.Config):
        weight: float = bounded(1.0, FINITE)
        """Weight of the team's part."""

    config: Config

    @property
    def reads_turn_scores(self) -> bool:
        return True

    def of_turns(self, batch: JointBatch) -> Tensor:
        return batch.scores_ERA * standing(batch) + self.config.weight * super().of_turns(batch)

    def outcome(self, batch: JointBatch) -> Tensor:
        return unanswered(batch) + self.config.weight * super().outcome(batch)


@register_credit("joint")
class Joint(Credit):
    """Every turn of an episode gets the sum of the scores of all its answers (CORY, arXiv:2410.06101), the team's score
    where there are none. If the conversation ended early, each agent's last turn adds the failure score."""

    kind = "return"
    adds_answers = True

    def assign(self, batch: JointBatch) -> Tensor:
        team_E = ~batch.answered_ERA.any((1, 2)) * batch.team_score_E
        once_E = torch.where(batch.failed_E, forfeits(batch).sum(-1), team_E)
        sum_E = (batch.scores_ERA * standing(batch)).sum((1, 2)) + once_E
        return sum_E[:, None, None] * batch.mask_ERA


@register_credit("zero_sum")
class ZeroSum(OutcomeCredit):
    """Zero-sum reward: the score of an agent's last answer, less the mean of the others' last ones; in a game its total payoff,
    less the mean of theirs.

    With two sides the rewards of an episode sum to 0 (SPIRAL, arXiv:2506.24119). 0 if no other agent answered, and for
    agents that never answer. An episode that ended early is not a draw: all sides lose it, as if the others had been right.
    A game's agent that names no action loses it (:meth:`marl.envs.games.Game.leads`).
    """

    sums_to_zero = True

    def of_turns(self, batch: JointBatch) -> Tensor:
        return torch.zeros_like(batch.scores_ERA)

    def outcome(self, batch: JointBatch) -> Tensor:
        answered_ERA = batch.answered_ERA.to(batch.scores_ERA.dtype)
        last_ERA = last_along(answered_ERA, 1)
        final_EA, answered_EA = (batch.scores_ERA * last_ERA).sum(1), last_ERA.sum(1)
        others_EA = answered_EA.sum(-1, keepdim=True) - answered_EA
        lost_EA = (final_EA.sum(-1, keepdim=True) - final_EA) / others_EA.clamp(min=1)
        outcome_EA = (final_EA - lost_EA) * answered_EA * (others_EA > 0)
        lead_EA = torch.where(batch.last_turns_ERA.bool(), batch.evidence_ERA(LEAD), torch.nan).nanmean(1)
        outcome_EA = torch.where(lead_EA.isnan(), outcome_EA, lead_EA)
        return torch.where(batch.failed_E[:, None], forfeits(batch) - 1, outcome_EA)


@register_credit("influence")
class Influence(Credit):
    """A turn's own score averaged with the team's in later rounds: MAPoRL's influence-aware reward (arXiv:2502.18439)."""

    kind = "return"

    @dataclass
    class Config(Credit.Config):
        gamma: float = bounded(0.3, SHARE)
        """Weight of the next round's team score; the paper's value. 1 weighs all rounds alike."""

    config: Config

    def assign(self, batch: JointBatch) -> Tensor:
        """Turns that are no answers enter no sum: each gets the mean of the later rounds or, after the last one, the
        team's score."""
        answered_ERA, gamma = batch.answered_ERA, self.config.gamma
        later_ER, weight_ER = credit.later_rounds(batch.scores_ERA, answered_ERA, gamma)
        later_ER = torch.where(weight_ER > 0, later_ER / weight_ER, batch.team_score_E[:, None])
        others_ERA = batch.mask_ERA & ~answered_ERA
        return credit.influence(batch.scores_ERA, answered_ERA, gamma) + later_ER[..., None] * others_ERA
