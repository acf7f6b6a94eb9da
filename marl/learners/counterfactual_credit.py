"""Counterfactual credit schemes: an agent's vote is removed or replaced."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from marl.batch.evidence import ballots_of
from marl.batch.joint import JointBatch
from marl.learners import credit
from marl.learners.credit_schemes import Credit, OutcomeCredit, register_credit
from marl.types import Ballot, Episode, Vote
from marl.utils.votes import winners

Place = tuple[int, int, int]
"""A turn's position in the grid: episode, round, agent."""


def ballot_score(ballot: Ballot, votes: Sequence[Vote]) -> float:
    """Score of the answer that the ballot's rule selects from these votes; for ties their mean, the expected value of
    the seeded tie-break. An answer gets the best score of the votes for it, as the team's does; no answer gets
    ``ballot.no_answer``."""
    best = winners(ballot.rule, [vote.answer for vote in votes], [vote.weight for vote in votes])
    scores = [max(vote.score for vote in votes if vote.answer == answer) for answer in best]
    return sum(scores) / len(best) if best else ballot.no_answer


def failed_of(batch: JointBatch) -> list[int]:
    """Indices of the episodes that ended early, without a team answer."""
    return batch.failed_E.nonzero().flatten().tolist()


def require_votes(batch: JointBatch, name: str) -> None:
    """Raise ValueError where a team decided without a vote."""
    failed = set(failed_of(batch))
    missing = next(
        (batch.tasks_E[e] for e, ballots in enumerate(batch.evidence.ballots) if not ballots and e not in failed), None
    )
    if missing is not None:
        raise ValueError(
            f"credit={name} distributes the score of the team's vote, and none was taken on task {missing}: let the runner end "
            "with marl.runners.decide, as debate and voting do, or use credit=team credit.of=answer"
        )


class DecidedByVote(Credit):
    """Credit for what the teams' votes decided."""

    votes = True

    def add_evidence(self, batch: JointBatch, episodes: Sequence[Episode], no_answer: float = 0.0) -> None:
        batch.evidence.ballots = [ballots_of(episode, no_answer) for episode in episodes]


@register_credit("shapley")
class Shapley(DecidedByVote, OutcomeCredit):
    """The score of the team's decision, divided among its voters by Shapley value.

    The shares of an episode sum to that score, averaged over tie-breaks, less the score of no answer. Where the
    conversation ended early, all who spoke share its failure score equally.
    """

    def of_turns(self, batch: JointBatch) -> Tensor:
        return torch.zeros_like(batch.scores_ERA)

    def outcome(self, batch: JointBatch) -> Tensor:
        require_votes(batch, self.config.name)
        shares_EA = torch.zeros_like(batch.scores_ERA[:, 0])
        shares = cache(shares_of)  # many teams vote alike
        for e, ballots in enumerate(batch.evidence.ballots):
            if not ballots:  # it failed
                spoke_A = batch.last_turns_ERA[e].sum(0)
                shares_EA[e] = batch.team_score_E[e] * spoke_A / spoke_A.sum().clamp(min=1)
                continue
            decided = ballots[-1]
            seats = {agent: seat for seat, agent in enumerate(dict.fromkeys(vote.agent for vote in decided.votes))}
            unnamed = tuple(replace(vote, agent=str(seats[vote.agent]), round=0) for vote in decided.votes)
            voters = [batch.agents.index(agent) for agent in seats]
            shares_EA[e, voters] = shares(replace(decided, votes=unnamed)).to(shares_EA.dtype)
        return shares_EA


def shares_of(ballot: Ballot) -> Tensor:
    """Shapley values of the voters "0", "1", …"""

    def value(voters: frozenset[int]) -> float:
        return ballot_score(ballot, [vote for vote in ballot.votes if int(vote.agent) in voters])

    return credit.shapley(value, len({vote.agent for vote in ballot.votes}))


@register_credit("counterfactual")
class Counterfactual(DecidedByVote):
    """Advantage of a vote over its agent's other answers to this task (COMA, arXiv:1705.08926).

        A_i = Q(a) - mean over a' of Q(a_-i, a')

    Q is the score of what the whole ballot decides. a' are the answers that the agent gave in this round in all samples of
    the task, its own included: its policy, as far as it was seen. A turn of an earlier round votes on what the team would
    have decided, had it ended there: all voters' last answers so far, by the same rule. What it does to later rounds is not
    seen here; credit=replay sees it. A turn that could not vote gets 0. Where the conversation ended early, each
    agent's last turn gets the failure score less the team's mean score over the task's samples.
    """

    kind = "advantage"
    compares_samples = True

    @dataclass
    class Config(Credit.Config):
        earlier_rounds: bool = True
        """Credit turns of earlier rounds; false leaves them at 0."""

    config: Config

    def assign(self, batch: JointBatch) -> Tensor:
        require_votes(batch, self.config.name)
        cast = [
            (place, ballot, vote)
            for e, ballots in enumerate(batch.evidence.ballots)
            for place, ballot, vote in votes_of(e, ballots if self.config.earlier_rounds else ballots[-1:], batch)
        ]
        alternatives: dict[tuple, list[Vote]] = {}
        for (e, *_), _, vote in cast:
            alternatives.setdefault((batch.tasks_E[e], vote.agent, vote.round), []).append(vote)
        credit_ERA = torch.zeros_like(batch.scores_ERA)
        for place, ballot, vote in cast:
            others = alternatives[batch.tasks_E[place[0]], vote.agent, vote.round]
            if any(other != vote for other in others):  # else exactly 0
                credit_ERA[place] = gain(ballot, vote, others)
        for e in failed_of(batch):
            alike_E = torch.tensor([task == batch.tasks_E[e] for task in batch.tasks_E])
            lost = batch.team_score_E[e] - batch.team_score_E[alike_E].mean()
            credit_ERA[e] = batch.last_turns_ERA[e] * lost
        return credit_ERA


def votes_of(episode: int, ballots: Sequence[Ballot], batch: JointBatch) -> Iterator[tuple[Place, Ballot, Vote]]:
    """Each turn that voted, once: in the decision, or else in the ballot after its own round."""
    seen: set[Place] = set()
    for ballot in reversed(ballots):
        ended = max((vote.round for vote in ballot.votes), default=0)
        for vote in ballot.votes:
            place = (episode, vote.round - 1, batch.agents.index(vote.agent))
            if place not in seen and (ballot is ballots[-1] or vote.round == ended):
                seen.add(place)
                yield place, ballot, vote


def gain(ballot: Ballot, vote: Vote, alternatives: Sequence[Vote]) -> Tensor:
    """A vote's advantage over these alternatives, which are equally likely and include itself."""
    at = ballot.votes.index(vote)
    q_K = [ballot_score(ballot, [*ballot.votes[:at], other, *ballot.votes[at + 1 :]]) for other in alternatives]
    policy_K = torch.full((len(q_K),), 1 / len(q_K), dtype=torch.float64)
    return credit.counterfactual(torch.tensor(q_K, dtype=torch.float64), [policy_K], [alternatives.index(vote)])[0]
