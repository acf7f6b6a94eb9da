"""A credit scheme of one's own that plays for its evidence, in one file outside the package."""

import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.learners import CREDITS, Credit, Gathered, Rollouts, register_credit
from marl.learners.gathering import Tried, Tries
from marl.runners import RecordedAnswers, scripted
from marl.types import Episode
from tests.builders import batch_of, build_learner, build_runner, episode, grid_of


@pytest.fixture
def regret(monkeypatch):
    """The scheme, registered for one test: the matrices over the registry are the built-in ones'."""
    monkeypatch.setattr(CREDITS, "_entries", dict(CREDITS._entries))

    @register_credit("regret")
    class Regret(Credit):
        """A team's score less the best one that another first answer would have led to."""

        kind = "advantage"

        @dataclass
        class Config(Credit.Config):
            tries: int = 2

        config: Config

        async def gather(self, episodes: Sequence[Episode], rollouts: Rollouts) -> Gathered:
            places = [
                (one, turn) for one in episodes for turn in one.path if turn.round == 1 and rollouts.trained(turn)
            ]
            tries = await rollouts.try_answers(places, self.config.tries, finishes=1)
            for entry in tries.tried:
                best = max(end.scored.value for end in entry.ends)
                entry.at.evidence["best"] = max(best, entry.at.evidence.get("best", best))
            return Gathered({"regret/failed": float(tries.failed)}, tries.tokens)

        def assign(self, batch: JointBatch) -> Tensor:
            return torch.nan_to_num(batch.team_score_E[:, None, None] - batch.evidence_ERA("best"))

    return Regret(Regret.Config("regret"))


class Scored:
    """Stands for the controller's rollouts: the n-th answer in a turn's place leads to a team score of n / 2."""

    def trained(self, turn):
        return turn.agent == "a"

    def rng(self, one):
        return random.Random(0)

    async def try_answers(self, places, alternatives, finishes):
        tried = []
        for one, at in places:
            for number in range(alternatives):
                end = copy.deepcopy(one)
                end.score = type(one.scored)(number / 2, None)
                tried.append(Tried(one, at, at, [end] * finishes))
        return Tries(tried, failed=0, turns=len(tried), tokens=5)


def test_its_evidence_reaches_the_learner(regret):
    records = [episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, None], [None, 0]])]
    records[1].score = type(records[1].scored)(0.0, None)
    regret.config.tries = 3
    gathered = asyncio.run(regret.gather(records, Scored()))
    assert gathered == Gathered({"regret/failed": 0.0}, 5)
    learner, batch = build_learner("grpo"), batch_of(*records)
    learner.credit = regret
    learner.assign_credit(batch)
    assert batch.evidence_ERA("best").isnan().sum() == 8 - 2, "the two first answers of a"
    assert grid_of(batch, "a").tolist() == [[[0.0, 0.0], [0.0, 0.0]], [[-1.0, 0.0], [0.0, 0.0]]]


def test_a_step_that_gathered_nothing_has_no_credit(regret):
    assert not regret.of(batch_of(episode("t", 0, [[1, 0], [0, 1]]))).any()


def test_a_turn_that_is_played_again_starts_without_evidence():
    runner, script = build_runner("debate"), scripted.scripted(scripted.listed(["4"]))
    record = asyncio.run(scripted.play(runner, episode("t", 0, [[], []]).task, ["a", "b"], script))
    record.turns[0].evidence["best"] = 1.0
    again = asyncio.run(scripted.play(runner, record.task, ["a", "b"], RecordedAnswers(record)))
    assert again.turns[0].evidence == {} and record.turns[0].evidence == {"best": 1.0}
