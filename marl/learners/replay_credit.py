"""Credit by replay: other answers are tried in a turn's place and played on from (C3, arXiv:2603.06859)."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

import torch
from torch import Tensor

from marl.batch.evidence import outcomes_of
from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.credit_schemes import Credit, register_credit
from marl.learners.extra_rollouts import Gathered, Rollouts, Tried
from marl.types import Episode, Turn
from marl.utils.numbers import Number, bounded, count


class ReturnOf(Enum):
    final = "final"
    """The mean score of the answers of the last round that has any."""
    answer = "answer"
    """The score of the team's answer."""


@register_credit("replay")
class ReplayCredit(Credit):
    """Other answers are tried in a turn's place, and each is played on to the end with the same weights (C3,
    arXiv:2603.06859): the team's return with an answer, less its mean return with the others."""

    kind = "advantage"

    @dataclass
    class Config(Credit.Config):
        alternatives: int = bounded(4, count(2, 1000))
        """Answers to a turn that are compared, the recorded one included."""
        finishes: int = bounded(1, count(1, 1000))
        """Number of continuations played from each answer; the mean of their returns counts."""
        of: ReturnOf = ReturnOf.final
        share: float = bounded(1.0, Number(0, 1, above=True))
        """Share of an episode's trained turns to credit, drawn anew for each episode. The others are not trained."""
        train_alternatives: bool = True
        """Train the other answers too."""

    config: Config

    def gather(self, episodes: Sequence[Episode], rollouts: Rollouts) -> Awaitable[Gathered]:
        return self._gather(episodes, rollouts)

    async def _gather(self, episodes: Sequence[Episode], rollouts: Rollouts) -> Gathered:
        """Give every chosen turn its ``outcomes``, and let the others be untrained. With ``train_alternatives`` the other
        answers become turns of the episode, which the conversation did not follow."""
        config = self.config
        chosen = [(episode, turn) for episode in episodes for turn in choose(episode, config.share, rollouts)]
        tries = await rollouts.try_answers(chosen, config.alternatives, config.finishes)
        by_turn: dict[int, list[Tried]] = {}
        for entry in tries.tried:
            by_turn.setdefault(id(entry.at), []).append(entry)
        for group in by_turn.values():
            compare(group, config)
        unequal = sum(len(set(turn.outcomes)) > 1 for _, turn in chosen)
        metrics = {
            "replay/turns": float(tries.turns),
            "replay/tokens": float(tries.tokens),
            "replay/failed": float(tries.failed),
            "replay/unequal": unequal / max(1, len(chosen)),
        }
        return Gathered(metrics, tries.tokens)

    def add_evidence(self, batch: JointBatch, episodes: Sequence[Episode], no_answer: float = 0.0) -> None:
        batch.evidence.outcomes_ERAK = outcomes_of(episodes, batch)

    def assign(self, batch: JointBatch) -> Tensor:
        outcomes_ERAK = batch.evidence.outcomes_ERAK
        if outcomes_ERAK is not None:
            return credit.replay_advantages(outcomes_ERAK)[..., 0]
        if batch.trained_ERA.any():
            raise ValueError("credit=replay needs other answers' returns: the trainer plays for them before this")
        return torch.zeros_like(batch.scores_ERA)


def choose(episode: Episode, share: float, rollouts: Rollouts) -> list[Turn]:
    """Select a random share of the trained turns, in their order; the rest are no longer trained."""
    turns = [turn for turn in episode.turns if turn.trained and rollouts.trained(turn)]
    followed = [turn for turn in turns if turn.kept]
    places = sorted(rollouts.rng(episode).sample(range(len(followed)), ceil(len(followed) * share)))
    chosen = [followed[place] for place in places]
    for turn in turns:
        turn.trained = any(turn is other for other in chosen)
    return chosen


def compare(group: Sequence[Tried], config: ReplayCredit.Config) -> None:
    """Record the returns of a turn's alternatives, each with its own first; mark the new ones for training."""
    returns = [mean_return(entry, config.of) for entry in group]
    for i, entry in enumerate(group):
        entry.turn.outcomes = [returns[i], *returns[:i], *returns[i + 1 :]]
        if entry.turn is not entry.at and config.train_alternatives:
            record, turn = entry.episode, entry.turn
            turn.branch = 1 + max(other.branch for other in record.turns if other.place[:2] == turn.place[:2])
            turn.kept = turn.compared = False
            record.turns.append(turn)
            record.sort()


def mean_return(entry: Tried, of: ReturnOf) -> float:
    return sum(team_return(end, of) for end in entry.ends) / len(entry.ends)


def team_return(episode: Episode, of: ReturnOf) -> float:
    answers = [turn for turn in episode.path if turn.answers]
    if of is ReturnOf.answer or not answers or episode.failure is not None:
        return episode.scored.value
    last = max(turn.round for turn in answers)
    scores = [turn.scored.value for turn in answers if turn.round == last]
    return sum(scores) / len(scores)
