"""Decision rules: the team's answer from its agents' answers."""

import random
from collections.abc import Collection, Sequence
from enum import Enum

from marl.runners.episode import LiveEpisode
from marl.types import Ballot, Rule, Turn, Vote
from marl.utils import votes


class Decide(Enum):
    majority = "majority"
    """The most frequent answer."""
    verifier = "verifier"
    """The answer with the largest sum of scores; fair where the reward function is a verifier that does not know the truth."""
    accuracy = "accuracy"
    """The answer with the largest sum of its agents' shares of right answers in training so far."""
    unanimous = "unanimous"
    """The answer that all give; none where they differ or somebody abstains."""
    last = "last"
    """The answer of the last turn; if several agents speak in that round, of the last seat."""


RULES = {
    Decide.majority: Rule.heaviest,
    Decide.verifier: Rule.heaviest,
    Decide.accuracy: Rule.heaviest,
    Decide.unanimous: Rule.agreed,
    Decide.last: Rule.last,
}


async def decide(
    rule: Decide, turns: Sequence[Turn], episode: LiveEpisode, among: Collection[str | None] | None = None
) -> str | None:
    """The team's answer, of one turn an agent or more. Abstentions do not count, nor what is not ``among`` the candidates;
    the episode's seed breaks ties. What was decided on is recorded (``Episode.ballot``)."""
    if rule is Decide.last:
        turns = sorted(turns, key=lambda turn: (turn.answers, turn.round))  # who has only passed has no say
    answers = [episode.answer(turn) for turn in turns]
    if among is not None:
        answers = [answer if answer in among else None for answer in answers]
    answers = votes.united(answers)
    weights = [1.0] * len(turns)
    if rule is Decide.verifier:
        weights = [(await episode.score(turn)).value for turn in turns]
    elif rule is Decide.accuracy:
        weights = [episode.record.accuracy.get(turn.agent, 0.5) for turn in turns]
    cast = zip(turns, answers, weights, strict=True)
    recorded = tuple(Vote(turn.agent, turn.round, answer, weight) for turn, answer, weight in cast)
    episode.record.ballot = Ballot(RULES[rule], recorded, by_score=rule is Decide.verifier)
    if RULES[rule] is Rule.heaviest:
        return heaviest(answers, weights, episode.rng)
    return next(iter(votes.winners(RULES[rule], answers, weights)), None)


def agreed(answers: Sequence[str | None]) -> str | None:
    """The answer that all give, or None."""
    return answers[0] if answers and len(set(votes.united(answers))) == 1 else None


def majority(answers: Sequence[str | None], rng: random.Random) -> str | None:
    """The most frequent answer; abstentions (None) do not count, ties are broken by the episode's seed."""
    return heaviest(votes.united(answers), [1.0] * len(answers), rng)


def heaviest(answers: Sequence[str | None], weights: Sequence[float], rng: random.Random) -> str | None:
    """The answer with the largest sum of weights; ties are broken at random, whatever the order of the answers."""
    best = votes.heaviest(answers, weights)
    return rng.choice(sorted(best)) if best else None
