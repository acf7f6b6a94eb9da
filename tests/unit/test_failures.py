"""Conversations that outgrow their context, texts that cannot be judged, and what the machine loses."""

import asyncio
import logging
import math
import selectors

import pytest
import torch
from omegaconf import OmegaConf

from marl.batch.evidence import ballots_of
from marl.cluster.failures import GroupFailed
from marl.config.deadlines import Deadline
from marl.controller.client import PolicyClient
from marl.controller.collection import EpisodesFailed, with_turns
from marl.controller.episode_workers import answer_of
from marl.controller.scores import score_failure, team_score
from marl.learners.credit_schemes import TeamOf
from marl.learners.replay_credit import ReturnOf, team_return
from marl.rewards import Reward, RewardUnavailable
from marl.rewards.processes import RewardError
from marl.runners import Runner
from marl.types import ContextOverflow, Episode, Score, Task, Turn
from marl.utils.deadlines import HangsError, Watch, own_time, waiting_for_others
from tests.builders import (
    DEBATE,
    batch_of,
    branch,
    build_learner as build,
    build_runner,
    collected,
    controller,
    episode,
    scheme,
    task,
)


class Skips(selectors.SelectSelector):
    """Time passes at once where nothing else happens: a test waits for nobody, and does not depend on the machine's load."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


def in_no_time(coroutine, selector=None):
    selector = selector or Skips()

    def loop():
        made = asyncio.SelectorEventLoop(selector)
        made.time = lambda: selector.now
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(coroutine)


def overflows(at=2, who="a", on=lambda task: True):
    def does(agent, round, task, **_):
        if round == at and agent in who and on(task):
            raise ContextOverflow("it was shown 99 tokens")
        return "4"

    return does


def test_an_overflow_is_an_outcome_with_the_turns_until_then():
    """b's turn of round 2 is one of them, whoever was faster."""
    team = controller(overflows(), failure_score=-0.5, max_error_rate=0.0)
    collection = collected(team)
    assert collection.refused == 1 and not collection.failures, "no error of the machine"
    (judged,) = asyncio.run(team.score(collection.episodes, 1))
    assert judged.failure == "overflow" and "99 tokens" in judged.failure_message and judged.answer is None
    assert [(turn.agent, turn.round) for turn in judged.turns] == [("a", 1), ("b", 1), ("b", 2)]
    assert judged.scored.value == -0.5 and team_return(judged, ReturnOf.final) == -0.5
    assert [turn.scored.value for turn in judged.turns] == [1.0, 1.0, 1.0], "what was said was right"
    trained_scores = [turn.scored.value - turn.scored.penalty for turn in judged.turns]
    assert trained_scores == [-0.5, 1.0, -0.5], "each agent pays once, at its last turn"
    batch = batch_of(judged)
    assert batch.failed_E.tolist() == [True] and batch.scores_ERA.tolist() == [[[-0.5, 1.0], [0.0, -0.5]]]
    assert batch.mask_ERA.tolist() == batch.trained_ERA.tolist() == [[[True, True], [False, True]]]


def test_many_overflows_are_warned_of_in_the_first_step(caplog):
    team = controller(overflows())
    asyncio.run(team.score(collected(team).episodes, 1))
    assert (
        "step 1: 1 of 1 conversations outgrew their context" in caplog.text and "it was shown 99 tokens" in caplog.text
    )


def test_a_pass_beside_an_overflow_is_no_answer():
    """b passes in the round in which a overflows: nobody judges its words as a wrong answer."""

    def does(agent, round, **_):
        if agent == "a" and round == 2:
            raise ContextOverflow("long")
        return "4" if round == 1 else "I pass"

    team = controller(does)
    team.runner = build_runner("debate", pass_word="pass")
    tasks = [Task("t", [{"role": "user", "content": "2 + 2"}], "4", "x", lambda text: text if text == "4" else None)]
    (judged,) = asyncio.run(team.score(asyncio.run(team.collect(tasks, 1, 1)).episodes, 1))
    assert [(turn.agent, turn.round, turn.answers) for turn in judged.turns] == [
        ("a", 1, True), ("b", 1, True), ("b", 2, False),
    ]  # fmt: skip


def test_overflowing_is_punished_beside_samples_that_ended():
    """Two right samples, two that overflowed in round 2: all advantages were 0."""
    samples = [episode("t", i, [[1.0, 1.0], [1.0, 1.0]]) for i in range(2)]
    for i in (2, 3):
        samples.append(failed(episode("t", i, [[1.0], [1.0]])))
    batch = batch_of(*samples)
    build("grpo", "own", std=False).assign_credit(batch)
    returns = [row.tolist() for row in batch.rows["a"]["advantages"].unbind()]
    assert [row[0] for row in returns] == [1.0, 0.0, 1.0, 0.0, -1.0, -1.0], "2 in round 1 beside 0"


def failed(record, score=0.0):
    """An episode that overflowed after these turns."""
    record.failure, record.ballot, record.score = "overflow", None, Score(score, None, failure="overflow")
    score_failure(record, dict.fromkeys(record.agents, score))
    return record


def test_the_best_of_a_tree_is_not_punished_for_what_came_after_it():
    record = branch(episode("t", 0, [[1.0], []]), "a", 1, [0.0, 0.5])
    failed(record, -1.0)
    assert [turn.scored.value - turn.scored.penalty for turn in record.turns] == [1.0, 0.0, 0.5]


def test_turns_that_are_no_answers_are_charged_for_a_failure_once():
    record = episode("t", 0, [[0.0, 0.0, 0.0], []])
    for turn in record.turns:
        turn.answers, turn.score = False, Score(-1.0, None)
    failed(record, -1.0)
    assert [turn.scored.value - turn.scored.penalty for turn in record.turns] == [0.0, 0.0, -1.0]


def test_an_overflow_is_no_draw():
    whole, ended = episode("t", 0, [[1.0], [1.0]]), failed(episode("t", 1, [[1.0], [0.0]]))
    got = scheme("zero_sum").assign(batch_of(whole, ended))
    assert got[:, 0].tolist() == [[0.0, 0.0], [-1.0, -1.0]], "both sides lose"


@pytest.mark.parametrize(
    "name,expected", [("shapley", [[0.0, 0.0], [-0.5, -0.5]]), ("counterfactual", [[0.0, 0.0], [-0.75, -0.75]])]
)
def test_a_team_that_decided_nothing_is_credited_all_the_same(name, expected):
    """Shares of -1 for two; and -1 less the mean of .5 and -1."""
    whole, ended = episode("t", 0, DEBATE), failed(episode("t", 1, [[1.0, 1.0], [1.0, 1.0]]), -1.0)
    assert ballots_of(ended) == []
    batch = batch_of(whole, ended)
    assert batch.team_score_E.tolist()[1] == -1.0
    batch.team_score_E[0] = 0.5
    assert scheme(name).assign(batch)[1].tolist() == expected


@pytest.mark.parametrize(
    "learner,credit", [("grpo", "own"), ("grpo", "shapley"), ("rae", "zero_sum"), ("magrpo", "team")]
)
def test_learners_take_a_batch_with_failures(learner, credit):
    batch = batch_of(episode("t", 0, DEBATE), failed(episode("t", 1, [[1.0], []])))
    build(learner, credit).assign_credit(batch)
    for rows in batch.rows.values():
        assert torch.isfinite(rows["advantages"].values()).all()


def test_the_same_tasks_are_measured_whatever_happens():
    """Six tasks: one overflows, one's server errs, one's reward dies; the rest is right."""

    def does(agent, round, task, **_):
        if task.id == "val/0":
            raise ContextOverflow("long")
        if task.id == "val/1":
            raise ValueError("a lost request")
        return "dies" if task.id == "val/2" else "4"

    def reward(solution_str, **_):
        if solution_str == "dies":
            raise RewardUnavailable("no process", "deaths")
        return 1.0

    team = controller(does, "single_turn", reward)
    episodes = asyncio.run(team.measure([task(i) for i in range(6)], 2, 1))
    assert [(e.task.id, e.sample) for e in episodes] == [(f"val/{i}", s) for i in range(6) for s in range(2)]
    assert [e.failure for e in episodes[::2]] == ["overflow", "error", "error", None, None, None]
    assert [e.scored.value for e in episodes[::2]] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


class Loses:
    """Errs the first times that it is asked for these samples."""

    def __init__(self, *lost, times=1):
        self.left = dict.fromkeys(lost, times)

    def __call__(self, agent, round, task, seed):
        key = task.id
        if self.left.get(key, 0) > 0:
            self.left[key] -= 1
            raise ConnectionError("the server is gone")
        return "4"


def test_a_task_that_lost_too_many_samples_is_played_again():
    """Three of four samples of val/0 are lost, one of four of val/1: the first alone is played again, with the same seeds."""
    losing = {("val/0", 0): 1, ("val/0", 1): 1, ("val/0", 2): 1, ("val/1", 3): 1}
    seeds: dict[tuple[str, int], list[int]] = {}

    class Loser(Runner):
        async def run(self, live):
            key = (live.task.id, live.record.sample)
            seeds.setdefault(key, []).append(live.record.seed)
            if losing.get(key, 0):
                losing[key] -= 1
                raise ConnectionError("the server is gone")
            return (await live.agents[0].act(live.agents[0].prompt)).text

    collection = collected(controller(runner=Loser), tasks=2, samples=4)
    assert collection.retried == 3 and len(collection.episodes) == 7
    assert [(t.id, sample) for t, sample in collection.lost] == [("val/1", 3)] and len(collection.failures) == 1
    assert len(seeds["val/0", 0]) == 2 and len(set(seeds["val/0", 0])) == 1 and len(seeds["val/1", 3]) == 1
    losing["val/1", 3] = 1
    assert collected(controller(runner=Loser), tasks=2, samples=4, validate=True).retried == 1, "validation wants all"


def test_attempts_end_and_the_first_one_decides_whether_the_run_goes_on():
    losing = Loses("val/0", times=5)
    collection = collected(controller(losing, "single_turn", max_attempts=2), tasks=3)
    assert collection.retried == 1 and len(collection.failures) == 1 and len(collection.episodes) == 2
    losing = Loses("val/0", "val/1")
    with pytest.raises(EpisodesFailed, match="2 of 3 episodes .*ConnectionError"):
        collected(controller(losing, "single_turn"), tasks=3)
    assert collected(controller(Loses("val/0"), "single_turn", max_attempts=1), tasks=3).retried == 0


def test_a_step_without_any_turn_ends_the_run_with_the_reason():
    with pytest.raises(EpisodesFailed, match="no episode has a single turn, task val/0: it was shown 99 tokens"):
        collected(controller(overflows(at=1, who="ab"), max_error_rate=1.0), tasks=2)
    one = controller(overflows(at=1, on=lambda task: task.id == "val/0"), "single_turn")
    assert [len(e.turns) for e in collected(one, tasks=2).episodes] == [1, 2], "b spoke"


def test_where_the_scores_of_all_that_spoke_are_lost_the_run_ends_with_the_reason():
    """Two tasks: one is too long from the start, and nothing was there to judge the other."""

    def away(solution_str, **_):
        raise RewardUnavailable("no process", "deaths")

    does = overflows(at=1, who="ab", on=lambda task: task.id == "val/0")
    team = controller(does, "single_turn", away, max_error_rate=0.5)
    scored = asyncio.run(team.score(collected(team, tasks=2).episodes, 7))
    assert [len(episode.turns) for episode in scored] == [0]
    with pytest.raises(EpisodesFailed, match="in step 7 no scored episode has a single turn: 1 were refused"):
        with_turns(scored, 7)


@pytest.mark.parametrize(
    "at,who,of_agents,team",
    [
        (1, "ab", [], -60.0),  # nothing was played
        (2, "ab", [-60.0, -60.0], -60.0),
        (3, "ab", [-3.0, -3.0, -40.0, -40.0], -43.0),
        (3, "b", [-3.0, -3.0, -3.0, -40.0, -20.0], -(26 + 43) / 2),  # a acted in stage 3
    ],
)
def test_a_game_that_overflows_pays_its_own_invalid(at, who, of_agents, team):
    """Three stages of -3 each; -20 for each one from an agent's last turn on, in place of what that earned."""

    def no_reward(*_, **__):
        raise AssertionError("the game scores its turns itself")

    one = controller(overflows(at=at, who=who), reward=no_reward, failure_score=0.5)
    stages = {"name": "matrix", "rounds": 3, "invalid": -20.0, "actions": ["4", "5"], "payoffs": [[-3, -3], [-3, -3]]}
    one.runner = build_runner("game", game=stages)
    (judged,) = asyncio.run(one.score(asyncio.run(one.outcomes_of([(task(), 0)], 1, False)), 1))
    assert judged.failure == "overflow" and judged.scored.value == team
    assert sorted(t.scored.value - t.scored.penalty for t in judged.turns) == sorted(of_agents)
    batch = batch_of(judged)
    sums_A = batch.scores_ERA.sum((0, 1))
    paid_A = scheme("own").of(batch).sum((0, 1))
    assert paid_A.tolist() == sums_A.tolist(), "earlier payoffs are paid once"
    forfeit_A = (batch.scores_ERA * batch.last_turns_ERA).sum((0, 1))
    spoke_A = batch.mask_ERA.any(1)[0]
    assert (scheme("joint").of(batch) == sums_A.sum() * batch.mask_ERA).all()
    final_ERA = scheme("team", of=TeamOf.final).of(batch)
    assert (final_ERA == forfeit_A.sum() / spoke_A.sum().clamp(min=1) * batch.last_turns_ERA).all()
    assert (scheme("zero_sum").of(batch).sum(1)[0] == (forfeit_A - 1) * spoke_A).all()


@pytest.mark.parametrize(
    "name,options", [("own", {}), ("team", {}), ("team", {"of": TeamOf.final}), ("mixed", {}), ("joint", {})]
)
@pytest.mark.parametrize("at", [2, 3, 6])
def test_a_game_that_overflows_earns_less_than_one_that_is_played(name, options, at):
    """Six stages of +3 each, and 0 for those that an overflow leaves."""
    stages = {"name": "matrix", "rounds": 6, "invalid": 0.0, "actions": ["4", "5"], "payoffs": [[3, 3], [3, 3]]}
    earned = []
    for does in (overflows(at=at, who="ab"), lambda *_, **__: "4"):
        one = controller(does)
        one.runner = build_runner("game", game=stages)
        batch = batch_of(*asyncio.run(one.score(asyncio.run(one.outcomes_of([(task(), 0)], 1, False)), 1)))
        credit = scheme(name, **options)
        sums_A = credit.of(batch).sum(1)[0] if credit.kind == "reward" else credit.of(batch)[0, 0]
        earned.append(sums_A.tolist())
    lost, played = earned
    assert lost[0] == lost[1] < played[0] == played[1]


def test_a_lost_game_counts_in_validation_as_its_own_invalid():
    def dies(agent, round, task, **_):
        if task.id == "val/0":
            raise ConnectionError("the server is gone")
        return "4"

    team = controller(dies, failure_score=0.5, max_error_rate=0.5)
    team.runner = build_runner("game", game={"name": "matrix", "rounds": 3, "invalid": -20.0, "actions": ["4", "5"]})
    lost, played = asyncio.run(team.measure([task(0), task(1)], 1, 1))
    assert lost.failure == "error" and lost.scored.value == -60.0 and played.scored.value == 0.0


def bad_text(solution_str, **_):
    if solution_str == "bad":
        raise RecursionError("brackets")
    return math.nan if solution_str == "nan" else 1.0


@pytest.mark.parametrize("bad,said", [("bad", "RecursionError: brackets"), ("nan", "returned nan")])
def test_a_text_on_which_the_reward_fails_costs_itself_alone(bad, said, caplog):
    team = controller(
        lambda agent, round, task, seed: bad if (agent, task.id) == ("a", "val/1") else "4", "single_turn", bad_text,
        failure_score=-0.25, no_answer_score=-9.0, max_error_rate=0.2,
    )  # fmt: skip
    episodes = collected(team, tasks=3).episodes
    with caplog.at_level(logging.WARNING):
        judged = asyncio.run(team.score(episodes, 7))
    assert [[turn.scored.value for turn in e.turns] for e in judged] == [[1, 1], [-0.25, 1], [1, 1]]
    assert said in judged[1].turns[0].scored.failure and "val/1" in caplog.text and "step 7" in caplog.text
    assert all(turn.trained for e in judged for turn in e.turns) and judged[1].failure is None
    team.max_error_rate = 0.1
    with pytest.raises(EpisodesFailed, match=f"failed for 1 of 6 texts of step 7 .*max_error_rate=0.1.*{said}"):
        asyncio.run(team.score(collected(team, tasks=3).episodes, 7))


def test_a_reward_that_is_not_there_is_asked_again_and_then_loses_the_episode():
    calls = []

    def flaky(solution_str, **_):
        calls.append(solution_str)
        if len(calls) in (1, 3, 4):
            raise RewardUnavailable("no process", "deaths")
        return 1.0

    team = controller(None, "single_turn", flaky, max_error_rate=0.5)
    judged = asyncio.run(team.score(collected(team, tasks=2).episodes, 1))
    assert len(judged) == 1 and judged[0].turns[0].scored.value == 1.0
    with pytest.raises(RewardError):
        asyncio.run(Reward(lambda **_: 1 / 0).judge(task(), "4"))


def test_the_teams_answer_gets_the_score_of_its_best_text():
    """Two agents gave it, and a reward of the form liked one of them: seats decide nothing."""
    for scores in ((1.0, 0.5), (0.5, 1.0)):
        record = Episode(task(), 0, ["a", "b"], [Turn(a, 1, [], "4") for a in "ab"], "4")
        for turn, score in zip(record.turns, scores, strict=True):
            turn.score = Score(score, "4")
        assert team_score(record).value == 1.0


def test_a_deadline_counts_an_episodes_own_time():
    async def run(own, waits):
        async with own_time(0.2):
            async with asyncio.TaskGroup() as group:  # waits overlap
                for seconds in waits:
                    group.create_task(waited(seconds))
            await asyncio.sleep(own)

    async def waited(seconds):
        with waiting_for_others():
            await asyncio.sleep(seconds)

    in_no_time(run(0.0, [0.5, 0.3]))
    with pytest.raises(TimeoutError):
        in_no_time(run(30.0, [0.3]))
    with pytest.raises(TimeoutError):
        in_no_time(run(30.0, []))


def test_a_queue_is_no_deadline_of_an_episode():
    """Forty texts wait for one another, longer in all than an episode may take; each is judged."""
    gate = asyncio.Semaphore(1)

    async def queued(solution_str, **_):
        async with gate:
            await asyncio.sleep(0.02)
        return 1.0

    class Asks(Runner):
        async def run(self, live):
            turn = await live.agents[0].act(live.agents[0].prompt)
            return str((await live.score(turn)).value)

    team = controller(runner=Asks, reward=queued, episode_timeout_s=0.4)
    collection = in_no_time(team.collect([task(i) for i in range(40)], 1, 1))
    assert len(collection.episodes) == 40


class Server:
    """Answers each request after its time; None for never."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    async def generate(self, **_):
        seconds = self.seconds.pop(0)
        await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))
        return "answer"


def test_a_hung_server_is_detected():
    client = PolicyClient(
        "p",
        OmegaConf.create({"name": "hf"}),
        Server(None),
        None,
        None,
        9,
        frozenset(),
        patience=Deadline(0.05, "resources.timeout_s"),
    )
    with pytest.raises(GroupFailed, match="policy 'p' while generating.*no request for resources.timeout_s=0.05 s"):
        in_no_time(client.request("s", [1], {}, 0))


def test_a_long_queue_that_moves_is_no_hang():
    """One waits longer than the patience, while others are answered."""

    async def run():
        watch, done = Watch(0.5), asyncio.Event()

        async def others():
            for _ in range(8):
                await watch.answer(asyncio.sleep(0.1))
            done.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(others())
            await watch.answer(done.wait())
        with pytest.raises(HangsError):
            await watch.answer(asyncio.Event().wait())

    in_no_time(run())


@pytest.mark.parametrize("own", [TimeoutError("no answer from the shop"), TimeoutError()])
def test_a_timeout_of_the_users_own_is_not_that_of_the_episode(own):
    """An environment's, or a reward's that a runner asks for: whatever an episode may take."""

    class Shops(Runner):
        async def run(self, live):
            raise own

    team = controller(runner=Shops, episode_timeout_s=5)
    outcome = in_no_time(team.outcomes_of([(task(), 0)], 1, False))[0]
    assert outcome is own
    with pytest.raises(TimeoutError) as resumed:
        in_no_time(team.resume(episode("t", 0, DEBATE), Turn("a", 1, [], "4"), 1, 1))
    assert resumed.value is own


def test_an_episode_that_takes_too_long_names_its_key():
    class Sleeps(Runner):
        async def run(self, live):
            await asyncio.Event().wait()

    team = controller(runner=Sleeps, episode_timeout_s=5)
    (outcome,) = in_no_time(team.outcomes_of([(task(), 0)], 1, False))
    assert "val/0, sample 0 took longer than controller.episode_timeout_s=5" in str(outcome)


@pytest.mark.parametrize("after", [0.0, 0.3, 0.45])
def test_a_loop_that_was_blocked_is_no_server_that_hangs(after):
    """A reward function holds the driver's loop for longer than the patience, while the server works on its answer."""
    selector = Skips()

    async def run():
        watch = Watch(0.5)

        async def reward():
            await asyncio.sleep(after)
            selector.now += 7.0

        async def server():
            await asyncio.sleep(after)
            await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            return "answer"

        async with asyncio.TaskGroup() as group:
            group.create_task(reward())
            assert await watch.answer(server()) == "answer"
        began = selector.now
        with pytest.raises(HangsError):
            await watch.answer(asyncio.Event().wait())
        assert selector.now - began == pytest.approx(0.5, abs=0.05)

    in_no_time(run(), selector)


def test_a_worker_is_waited_for_as_long_as_it_lives():
    async def run(alive):
        pings = []

        async def ping():
            pings.append(1)
            if not alive:
                await asyncio.Event().wait()

        async def works():
            while len(pings) < 3:
                await asyncio.sleep(0.01)
            return "played"

        return await answer_of(works(), ping, 0.2)

    assert in_no_time(run(alive=True)) == "played"
    with pytest.raises(TimeoutError):
        in_no_time(run(alive=False))
