"""Work that does not wait for other work, by what would never end if it did."""

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest

from marl.cluster.failures import GroupFailed
from marl.marl_trainer import MARLTrainer
from marl.utils.metrics import PhaseTimer
from tests.builders import batch_of, build_learner, collected, controller, episode

PATIENCE_S = 20.0


def test_an_episode_is_scored_while_another_still_talks():
    """The second episode answers once the first one's answers are judged."""
    judged, given = asyncio.Event(), []

    class Waits:
        def __init__(self, plain):
            self.plain, self.rollout = plain, plain.rollout

        async def act(self, agent, *arguments, task, **settings):
            if task.id == "val/1":
                await asyncio.wait_for(judged.wait(), PATIENCE_S)
            return await self.plain.act(agent, *arguments, task=task, **settings)

    async def reward(solution_str, **_):
        given.append(solution_str)
        judged.set()
        return 1.0

    team = controller(runner="single_turn", reward=reward, max_error_rate=0.0)
    team.clients = {name: Waits(client) for name, client in team.clients.items()}
    collection = collected(team, tasks=2)
    assert [episode.scored.value for episode in collection.episodes] == [1.0, 1.0]
    scored = asyncio.run(team.score(collection.episodes, 1))
    assert len(given) == 4 and scored == collection.episodes, "each text is judged once"
    assert not team.judged


def test_a_policy_that_dies_while_it_judges_ends_the_collection():
    async def judge(*_):
        raise GroupFailed("policy 'judge' died")

    team = controller(runner="single_turn", max_error_rate=1.0)
    team.judge = judge
    with pytest.raises(GroupFailed, match="policy 'judge' died"):
        collected(team, tasks=2)


def test_policies_are_updated_beside_one_another():
    """Neither update ends before the other has begun."""
    begun = Counter()

    class Group:
        def __init__(self, name, both):
            self.name, self.both = name, both

        async def update_actor(self, rows):
            begun[self.name] += 1
            if len(begun) == 2:
                self.both.set()
            await asyncio.wait_for(self.both.wait(), PATIENCE_S)
            return {"loss": 0.0}

    async def update():
        both, batch = asyncio.Event(), batch_of(episode("t", 0, [[1.0], [0.0]]))
        learner = build_learner("grpo")
        learner.assign_credit(batch)
        return await learner.update(batch, {name: Group(name, both) for name in batch.rows})

    assert len(asyncio.run(update())) == 2 and set(begun.values()) == {1}


class Reads:
    """A trainer whose parts note when they begin and end."""

    def __init__(self, corrects):
        self.noted = []
        self.references = SimpleNamespace(corrects=corrects, compare=partial(self.work, "ref_log_probs"))
        self.critics = SimpleNamespace(value=partial(self.work, "values"))
        self.log_probs = partial(self.work, "log_probs")

    async def work(self, name, *_):
        self.noted.append(f"{name} begin")
        await asyncio.sleep(0)
        self.noted.append(f"{name} end")
        return {name: 1.0}


@pytest.mark.parametrize("corrects", [False, True])
def test_critics_read_beside_the_policies_unless_rows_are_dropped_first(corrects):
    trainer, phase = Reads(corrects), PhaseTimer()
    read = asyncio.run(MARLTrainer.read(trainer, [], None, phase))
    assert read == ({"log_probs": 1.0}, {"ref_log_probs": 1.0})
    assert set(phase.seconds) == {"log_probs", "ref_log_probs", "values"} and len(trainer.noted) == 6
    order = trainer.noted.index
    assert order("log_probs end") < order("ref_log_probs begin"), "both are the policies' own"
    assert (order("values begin") < order("log_probs end")) is not corrects
    assert (order("ref_log_probs end") < order("values begin")) is corrects
