"""Counterfactual rollouts: episodes resumed at a turn with another answer and played to their ends."""

import random
from collections.abc import Callable, Sequence

from marl.controller.collection import outcomes
from marl.controller.controller import Controller
from marl.learners.extra_rollouts import Tried, Tries
from marl.runners import together
from marl.types import Episode, Turn
from marl.utils.seeding import derive_seed

Work = tuple[Episode, Turn, int]
"""An episode, the turn in whose place another answer is tried, and its number."""


class AlternativeRollouts:
    """The controller's :class:`marl.learners.extra_rollouts.Rollouts` of one step."""

    def __init__(self, controller: Controller, step: int, trained: Callable[[Turn], bool]) -> None:
        self.controller, self.step, self.trained = controller, step, trained

    def rng(self, episode: Episode) -> random.Random:
        return random.Random(derive_seed(self.controller.seed, "replayed", self.step, episode.task.id, episode.sample))

    async def try_answers(self, places: Sequence[tuple[Episode, Turn]], alternatives: int, finishes: int) -> Tries:
        works = [(*place, number) for place in places for number in range(alternatives)]
        tried_at = [(episode.task.id, episode.sample, *at.place, number) for episode, at, number in works]

        async def attempt(works: Sequence[Work]) -> tuple[list[Tried | Exception], int]:
            results = await outcomes([self._attempt(*work, finishes) for work in works])
            self.controller.failures_of(results, "playing on with other answers", self.step)
            return results, 0

        known_by = tried_at, [alternatives, finishes]
        results, _ = await self.controller.unless_lost("lost_alternatives", self.step, known_by, works, attempt)
        tried = [result for result in results if isinstance(result, Tried)]
        scored = await self.controller.score([end for entry in tried for end in entry.fresh()], self.step)
        scored_ids = {id(end) for end in scored}
        known = [entry for entry in tried if all(id(end) in scored_ids for end in entry.fresh())]
        return Tries(known, len(results) - len(known), *sampled(tried))

    async def _attempt(self, episode: Episode, at: Turn, number: int, finishes: int) -> Tried:
        """Alternative 0 is the recorded answer, and the recorded episode is its first continuation."""
        seeds = range(number * finishes, (number + 1) * finishes)
        first = await self.controller.resume(episode, at, self.step, seeds[0]) if number else episode
        answer = next(turn for turn in first.turns if turn.place == at.place)
        others = [self.controller.resume(episode, at, self.step, seed, answer) for seed in seeds[1:]]
        return Tried(episode, at, answer, [first, *await together(others)])


def sampled(tried: Sequence[Tried]) -> tuple[int, int]:
    """Number of turns, and of their tokens, newly sampled from the servers: those whose seed is not in the record."""
    turns, tokens = 0, 0
    for entry in tried:
        known = {turn.seed for turn in entry.episode.turns}
        fresh = {turn.seed: turn for end in entry.fresh() for turn in end.turns if turn.seed not in known}
        turns += len(fresh)
        tokens += sum(sum(turn.response_mask) for turn in fresh.values())
    return turns, tokens
