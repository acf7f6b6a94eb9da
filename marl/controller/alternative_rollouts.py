"""What would have become of other answers: episodes are taken up at a turn, answered anew there and played to their ends
(C3, arXiv:2603.06859)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from marl.controller.controller import Controller, outcomes
from marl.learners.counterfactual_credit import ReplayCredit, ReturnOf
from marl.runners import together
from marl.types import Episode, Metrics, Turn
from marl.utils.seeding import derive_seed


@dataclass(slots=True)
class Tried:
    """An answer in a turn's place, and the episodes that followed from it."""

    episode: Episode
    at: Turn
    turn: Turn
    ends: list[Episode]

    def fresh(self) -> list[Episode]:
        """The ends that were played for it: all but the recorded one."""
        return [end for end in self.ends if end is not self.episode]

    def mean_return(self, of: ReturnOf) -> float:
        return sum(team_return(end, of) for end in self.ends) / len(self.ends)


async def replay(
    controller: Controller,
    episodes: Sequence[Episode],
    plan: ReplayCredit.Config,
    step: int,
    trained: Callable[[Turn], bool],
) -> Metrics:
    """Give every trained turn that the plan chooses its ``outcomes``, and let the others be untrained. With
    ``plan.train_alternatives`` the other answers become turns of the episode, which the conversation did not follow.

    What fails is logged and left out; raises EpisodesFailed for too much of it.
    """
    chosen = [(episode, turn) for episode in episodes for turn in choose(controller, episode, plan, step, trained)]
    works = [(*pair, number) for pair in chosen for number in range(plan.alternatives)]
    results = await outcomes([attempt(controller, *work, plan, step) for work in works])
    failed = controller.failures_of(results, "playing on with other answers", step)
    tried = [result for result in results if isinstance(result, Tried)]
    judged = {id(end) for end in await controller.score([end for entry in tried for end in entry.fresh()], step)}
    known = [entry for entry in tried if all(id(end) in judged for end in entry.fresh())]
    metrics = sampled(tried)  # before the episodes hold what was tried
    by_turn: dict[int, list[Tried]] = {}
    for entry in known:
        by_turn.setdefault(id(entry.at), []).append(entry)
    for group in by_turn.values():
        compare(group, plan)
    unequal = sum(len(set(turn.outcomes)) > 1 for _, turn in chosen)
    return metrics | {
        "replay/failed": float(len(failed) + len(tried) - len(known)),
        "replay/unequal": unequal / max(1, len(chosen)),
    }


def choose(
    controller: Controller, episode: Episode, plan: ReplayCredit.Config, step: int, trained: Callable[[Turn], bool]
) -> list[Turn]:
    """A share of the trained turns, in their order; the rest is not trained from now on."""
    turns = [turn for turn in episode.turns if turn.trained and trained(turn)]
    followed = [turn for turn in turns if turn.kept]
    rng = random.Random(derive_seed(controller.seed, "replayed", step, episode.task.id, episode.sample))
    places = sorted(rng.sample(range(len(followed)), ceil(len(followed) * plan.share)))
    chosen = [followed[place] for place in places]
    for turn in turns:
        turn.trained = any(turn is other for other in chosen)
    return chosen


async def attempt(
    controller: Controller, episode: Episode, at: Turn, number: int, plan: ReplayCredit.Config, step: int
) -> Tried:
    """Alternative 0 is what was said, and what became of it its first end."""
    seeds = range(number * plan.finishes, (number + 1) * plan.finishes)
    first = await controller.resume(episode, at, step, seeds[0]) if number else episode
    answer = next(turn for turn in first.turns if turn.place == at.place)
    others = [controller.resume(episode, at, step, seed, answer) for seed in seeds[1:]]
    return Tried(episode, at, answer, [first, *await together(others)])


def team_return(episode: Episode, of: ReturnOf) -> float:
    answers = [turn for turn in episode.path if turn.answers]
    if of is ReturnOf.answer or not answers or episode.failure is not None:
        return episode.scored.value
    last = max(turn.round for turn in answers)
    scores = [turn.scored.value for turn in answers if turn.round == last]
    return sum(scores) / len(scores)


def compare(group: Sequence[Tried], plan: ReplayCredit.Config) -> None:
    """Write down the returns of a turn's alternatives, at each its own first; let the new ones be trained."""
    returns = [entry.mean_return(plan.of) for entry in group]
    for i, entry in enumerate(group):
        entry.turn.outcomes = [returns[i], *returns[:i], *returns[i + 1 :]]
        if entry.turn is not entry.at and plan.train_alternatives:
            record, turn = entry.episode, entry.turn
            turn.branch = 1 + max(other.branch for other in record.turns if other.place[:2] == turn.place[:2])
            turn.kept = turn.compared = False
            record.turns.append(turn)
            record.sort()


def sampled(tried: Sequence[Tried]) -> Metrics:
    """How many turns, and tokens of them, the servers were asked for: those with a seed that the record does not know."""
    turns, tokens = 0, 0
    for entry in tried:
        known = {turn.seed for turn in entry.episode.turns}
        fresh = {turn.seed: turn for end in entry.fresh() for turn in end.turns if turn.seed not in known}
        turns += len(fresh)
        tokens += sum(sum(turn.response_mask) for turn in fresh.values())
    return {"replay/turns": float(turns), "replay/tokens": float(tokens)}
