"""A step that was killed after it had lost something loses the same again: another outcome would be another update."""

import asyncio

import pytest

from marl.controller.alternative_rollouts import AlternativeRollouts
from marl.controller.collection import EpisodeLost, described
from marl.controller.recorded_ledger import RecordedLedger
from marl.rewards import RewardUnavailable
from marl.types import Task
from tests.builders import controller, task

LIMITS = {"max_attempts": 1, "max_error_rate": 0.9}


def without_scorer(team, *names):
    """Nothing is there to score these tasks."""
    judge = team.reward.judge_or_fail

    async def judge_others(task, text, failure_score):
        if task.id in names:
            raise RewardUnavailable("no process took it", "deaths")
        return await judge(task, text, failure_score)

    team.reward.judge_or_fail = judge_others
    return team


def scored(team, tasks=3, step=1):
    async def play():
        team.ledger.begin(step, {"a": {"w": ((1,), 1, 7)}})
        collection = await team.collect([task(i) for i in range(tasks)], 1, step)
        return await team.score(collection.episodes, step)

    found = asyncio.run(play())
    team.ledger.close()
    return [episode.task.id for episode in found]


@pytest.mark.parametrize("resumes", [1, 2])
def test_an_episode_that_nothing_was_there_to_score_is_dropped_again(tmp_path, resumes):
    assert scored(without_scorer(controller(folder=tmp_path, **LIMITS), "val/1")) == ["val/0", "val/2"]
    for _ in range(resumes):
        again = controller(folder=tmp_path, **LIMITS)
        assert scored(again) == ["val/0", "val/2"] and not again.clients["a"].asked
    assert scored(controller(folder=tmp_path, **LIMITS), step=2) == ["val/0", "val/1", "val/2"], "of another step"


def test_too_many_that_could_not_be_scored_end_the_run_which_scores_them_when_it_goes_on(tmp_path):
    with pytest.raises(Exception, match="the reward function failed for every episode"):
        scored(
            without_scorer(
                controller(folder=tmp_path, **LIMITS | {"max_error_rate": 1.0}), *map("val/{}".format, range(3))
            )
        )
    assert len(scored(controller(folder=tmp_path, **LIMITS))) == 3


@pytest.mark.parametrize("scores", [True, False])
def test_a_replay_drops_them_too_unless_it_asks_the_reward_again(tmp_path, scores):
    scored(without_scorer(controller(folder=tmp_path, **LIMITS), "val/1"))
    replay = controller(**LIMITS)
    replay.ledger = RecordedLedger(tmp_path, scores=scores)

    async def play():
        collection = await replay.collect([task(i) for i in range(3)], 1, 1)
        return await replay.score(collection.episodes, 1)

    assert [episode.task.id for episode in asyncio.run(play())] == ["val/0", *([] if scores else ["val/1"]), "val/2"]


def other_tasks(count):
    """Rows of another file, with the same ids."""
    return [Task(f"val/{i}", [{"role": "user", "content": f"other {i}"}], "4", "y", str) for i in range(count)]


def test_an_unscored_episode_is_that_of_the_task_that_was_asked(tmp_path):
    first = without_scorer(controller(folder=tmp_path, **LIMITS), "val/1")
    assert [e.failure for e in asyncio.run(first.measure([task(i) for i in range(3)], 1, 0))] == [None, "error", None]
    first.ledger.close()
    for tasks, failures in (([task(i) for i in range(3)], [None, "error", None]), (other_tasks(3), [None] * 3)):
        team = controller(folder=tmp_path, **LIMITS)
        assert [episode.failure for episode in asyncio.run(team.measure(tasks, 1, 0))] == failures
        team.ledger.close()


def test_lost_plays_are_those_of_the_tasks_that_were_asked(tmp_path):
    """Rows of two validation files have the same ids."""

    def does(agent, round, task, **_):
        if task.id == "val/1":
            raise RuntimeError("the episode worker was out of memory")
        return "4"

    first = controller(does, folder=tmp_path, **LIMITS)
    assert [e.failure for e in asyncio.run(first.measure([task(i) for i in range(3)], 1, 0))] == [None, "error", None]
    first.ledger.close()
    for tasks, failures in (
        ([task(i) for i in range(3)], [None, "error", None]),
        (other_tasks(3), [None] * 3),
    ):
        team = controller(folder=tmp_path, **LIMITS)
        assert [episode.failure for episode in asyncio.run(team.measure(tasks, 1, 0))] == failures
        team.ledger.close()


class FailsAt:
    """Answers, but not at these calls."""

    def __init__(self, *calls):
        self.calls, self.made = calls, 0

    def __call__(self, agent, round, **_):
        self.made += 1
        if self.made in self.calls:
            raise RuntimeError(f"call {self.made}")
        return str(self.made)


def tried(team):
    """An episode of two rounds, and three alternatives of its first turn; their answers, and how many were lost."""

    async def play():
        (episode,) = (await team.collect([task(0)], 1, 1)).episodes
        rollouts = AlternativeRollouts(team, 1, lambda turn: True)
        return await rollouts.try_answers([(episode, episode.turns[0])], 3, 1)

    found = asyncio.run(play())
    team.ledger.close()
    return [entry.turn.text for entry in found.tried], found.failed


def test_an_alternative_that_was_lost_is_lost_again(tmp_path):
    unbroken = tried(controller(FailsAt(6), folder=tmp_path, **LIMITS))
    healthy = FailsAt()
    assert unbroken[1] == 1 and tried(controller(healthy, folder=tmp_path, **LIMITS)) == unbroken and healthy.made == 0
    assert tried(controller(folder=None, **LIMITS))[1] == 0


def test_recorded_turns_of_other_weights_give_a_warning(tmp_path, caplog):
    for weights, told in ((7, 0), (7, 0), (8, 1)):
        team = controller(folder=tmp_path)
        team.ledger.begin(1, {"a": {"w": ((1,), 1, weights)}})
        team.ledger.close()
        assert (
            caplog.text.count("step 1: the turns recorded before the run was interrupted came from other weights")
            == told
        )


def test_an_error_keeps_its_text_however_often_it_is_lost():
    assert described(EpisodeLost(described(RuntimeError("late")))) == "RuntimeError: late"


def test_the_ledger_holds_no_secret_of_an_error(tmp_path):
    def refused(agent, round, task, **_):
        if task.id == "val/1":
            raise RuntimeError("GET https://ann:correct7horse@host/v1 failed")
        return "4"

    team = controller(refused, folder=tmp_path, **LIMITS)
    asyncio.run(team.measure([task(i) for i in range(3)], 1, 0))
    team.ledger.close()
    (written,) = (path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "RuntimeError: GET https://***@host/v1 failed" in written and "correct7horse" not in written
