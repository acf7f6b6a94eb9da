"""A credit scheme of one's own that plays for its evidence, in one file outside the package."""

import asyncio
import copy
import importlib
import random
import sys

import pytest

from marl.learners import CREDITS, Gathered
from marl.learners.extra_rollouts import Tried, Tries
from marl.runners import RecordedAnswers, scripted
from tests.builders import batch_of, build_learner, build_runner, episode, grid_of, scheme


@pytest.fixture
def regret(monkeypatch):
    """The scheme, registered for one test: it is not among those that the matrices over the registry run."""
    monkeypatch.setattr(CREDITS, "_entries", dict(CREDITS._entries))
    monkeypatch.delitem(sys.modules, "recipe.regret", raising=False)
    importlib.import_module("recipe.regret")
    return scheme("regret", tries=3)


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
