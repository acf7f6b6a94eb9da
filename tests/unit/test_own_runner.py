"""A runner of one's own, tested without a model."""

import asyncio
import gc
import re

import pytest

from marl.config.errors import ConfigError
from marl.controller.collection import outcomes
from marl.envs import Environment
from marl.envs.games import Game
from marl.learners import Learner
from marl.preflight.compatibility import check_facts
from marl.run_setup import Setup
from marl.runners import RUNNERS, RecordedAnswers, ReplayDiverged, Runner, TooManyTurns, keep, scripted, together
from marl.runners.debate import Sees
from marl.types import Score, Task
from marl.utils.class_facts import check_class
from recipe.leave_one_out import LeaveOneOut
from recipe.peer_review import PeerReview
from recipe.regret import Regret

TASK = Task("t", [{"role": "user", "content": "2+2?"}], "4", "x", lambda text: text if text.isdigit() else None)
RUNNER = PeerReview(PeerReview.Config("peer_review", peer_template="{agent}:{text}", separator=" ", revise="Again."))


def script(agent, round, observation):
    return {1: {"a": "4", "b": "5"}[agent], 2: f"{agent} doubts it", 3: "4"}[round]


def test_every_draft_is_reviewed_by_the_next_and_revised_by_its_author():
    record = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], scripted.scripted(script)))
    assert [m["content"] for m in record.trajectory("a")[2].observation] == [
        "2+2?",
        "4",
        "b:5 Say in a sentence whether this is right.",
        "a doubts it",
        "b:b doubts it Again.",
    ]
    assert record.answer == "4" and [turn.answers for turn in record.trajectory("b")] == [True, False, True]
    assert dict.fromkeys("ab", 3) == RUNNER.most_turns(["a", "b"])


def test_answers_from_a_list_and_texts_that_tell_turns_apart():
    listed = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], scripted.scripted(scripted.listed(["4", "5"]))))
    assert sorted(turn.text for turn in listed.turns) == ["4"] * 3 + ["5"] * 3
    numbered = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], scripted.scripted(scripted.numbered)))
    assert len({turn.text for turn in numbered.turns}) == 6


def test_it_is_played_again_and_from_its_middle():
    record = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], scripted.scripted(script)))
    again = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], RecordedAnswers(record)))
    assert again.turns == record.turns and again.answer == record.answer
    review = next(turn for turn in record.turns if turn.place == ("b", 2, 0))

    def other(agent, round, observation):
        assert round == 3, "all before, and what was said at the same time, is as it was"
        return "7"

    changed = RecordedAnswers(record, scripted.scripted(other), {review.place: type(review)("b", 2, [], "it is 7")})
    resumed = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], changed))
    assert resumed.trajectory("a")[2].observation[-1]["content"] == "b:it is 7 Again." and resumed.answer == "7"
    assert {turn.text for turn in resumed.turns if turn.round < 3} == {"4", "5", "a doubts it", "it is 7"}


def test_what_comes_after_a_change_is_asked_anew_even_where_the_agent_is_shown_the_same():
    ring = RUNNERS.get("debate").Config("debate", sees=Sees.ring)
    runner, team = RUNNERS.get("debate")(ring), ["a", "b", "c"]
    record = asyncio.run(scripted.play(runner, TASK, team, scripted.scripted(scripted.listed(["4"]))))
    changed = RecordedAnswers(record, scripted.scripted(lambda agent, round, seen: "7"), {("a", 1, 0): None})
    resumed = asyncio.run(scripted.play(runner, TASK, team, changed))
    assert [(*turn.place[:2], turn.text) for turn in resumed.turns] == [
        ("a", 1, "7"), ("b", 1, "4"), ("c", 1, "4"), ("a", 2, "7"), ("b", 2, "7"), ("c", 2, "7"),
    ]  # fmt: skip


def test_a_recorded_answer_keeps_its_score_and_what_is_none_has_to_earn_it_again():
    record = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], scripted.scripted(script)))
    for turn in record.turns:
        turn.score = Score(1.0, None)
    again = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], RecordedAnswers(record)))
    assert [turn.score is None for turn in again.trajectory("a")] == [False, True, False]


def test_a_record_of_another_runner_is_refused():
    record = asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], scripted.scripted(script)))
    record.turns = [turn for turn in record.turns if turn.round < 3]
    try:
        asyncio.run(scripted.play(RUNNER, TASK, ["a", "b"], RecordedAnswers(record)))
    except ReplayDiverged as error:
        assert "holds no turn of 'a' in round 3" in str(error)
    else:
        raise AssertionError("the record ends after round 2")


class Insists(Runner):
    """Every agent speaks ``rounds`` times, or tries so many answers at once; it says twice."""

    rounds, branches = 2, 0

    async def run(self, episode):
        for agent in episode.agents:
            for _ in range(self.rounds):
                turn = await agent.act(agent.prompt)
            if self.branches:
                turns = await agent.alternatives(agent.prompt, self.branches)
                turn = keep(turns[0], turns, train_all=True)
        return episode.answer(turn)

    def most_turns(self, agents):
        return dict.fromkeys(agents, 2)


def insisting(rounds, branches=0):
    runner = Insists(Runner.Config("insists"))
    runner.rounds, runner.branches = rounds, branches
    return scripted.play(runner, TASK, ["a", "b"], scripted.scripted(scripted.listed(["4"])))


@pytest.mark.parametrize("rounds,branches,spoken", [(3, 0, 3), (50, 0, 3), (0, 3, 3), (1, 2, 3)])
def test_a_runner_that_exceeds_its_own_most_turns_is_named_with_the_numbers(rounds, branches, spoken):
    with pytest.raises(TooManyTurns, match=f"runner=insists: agent 'a' speaks {spoken} times.* most_turns says 2"):
        asyncio.run(insisting(rounds, branches))


@pytest.mark.parametrize("rounds,branches", [(2, 0), (0, 2), (1, 1)])
def test_a_runner_may_go_as_far_as_it_says(rounds, branches):
    assert asyncio.run(insisting(rounds, branches)).answer == "4"


def test_it_ends_the_run_and_not_one_episode_among_many():
    """Dropped as other failures are, the longest conversations would be missing from what is trained."""
    with pytest.raises(TooManyTurns):
        asyncio.run(outcomes([insisting(2), insisting(3)]))


class Often(Runner):
    """Each agent answers three times beside the others; then all answer once more."""

    async def run(self, episode):
        await together(self.thrice(agent) for agent in episode.agents)
        turns = await together(agent.act(agent.prompt) for agent in episode.agents)
        return turns[0].text

    async def thrice(self, agent):
        await agent.act(agent.prompt)
        await together([agent.act(agent.prompt)])  # a branch within a branch
        await agent.act(agent.prompt)

    def most_turns(self, agents):
        return dict.fromkeys(agents, 4)


@pytest.mark.parametrize("slowest", ["a", "b", "c"])
def test_rounds_of_agents_that_act_at_the_same_time_do_not_depend_on_who_answers_first(slowest):
    said = scripted.scripted(lambda agent, round, observation: f"{agent}{round}")

    async def late(agent, observation, round, previous, branch):
        for _ in range(20 if agent == slowest else 1):
            await asyncio.sleep(0)
        return await said(agent, observation, round, previous, branch)

    record = asyncio.run(scripted.play(Often(Runner.Config("often")), TASK, ["a", "b", "c"], late))
    assert sorted(turn.text for turn in record.turns) == [
        f"{agent}{round}" for agent in "abc" for round in (1, 2, 3, 4)
    ]


def test_episodes_after_one_another_in_one_task_begin_in_round_1():
    async def rounds():
        said = scripted.scripted(scripted.numbered)
        return [sorted(turn.round for turn in (await scripted.play(Often(Runner.Config("often")), TASK, ["a"], said)).turns) for _ in range(2)]  # fmt: skip

    assert asyncio.run(rounds()) == [[1, 2, 3, 4]] * 2


def test_a_round_after_the_last_one_is_refused():
    runner = Often(Runner.Config("often"))
    runner.last_round = lambda agents: 3
    with pytest.raises(
        TooManyTurns, match="runner=often: agent 'a' speaks in round 4, and its last_round says 3.*fix last_round"
    ):
        asyncio.run(scripted.play(runner, TASK, ["a"], scripted.scripted(scripted.numbered)))


class Gathers(Runner):
    """Tasks of its own before the branches and within them."""

    async def run(self, episode):
        await asyncio.gather(*(agent.act(agent.prompt) for agent in episode.agents))
        await together([self.pair(episode.agents[:2]), self.pair(episode.agents[2:])])
        return (await episode.agents[0].act(episode.agents[0].prompt)).text

    async def pair(self, agents):
        await asyncio.gather(*(agent.act(agent.prompt) for agent in agents))
        for agent in agents[:1]:
            await asyncio.wait_for(agent.act(agent.prompt), 10)
            await agent.act(agent.prompt)

    def most_turns(self, agents):
        return dict.fromkeys(agents, 5)


@pytest.mark.parametrize("episodes", [1, 2])
def test_turns_of_tasks_that_a_runner_starts_count_for_it(episodes):
    """Also where whole episodes are branches, as those of ``credit=replay`` are."""

    async def play():
        said, seats = scripted.scripted(scripted.numbered), ["a", "b", "c", "d"]
        runner = Gathers(Runner.Config("gathers"))
        return await together(scripted.play(runner, TASK, seats, said) for _ in range(episodes))

    for record in asyncio.run(play()):
        rounds = {agent: sorted(turn.round for turn in record.turns if turn.agent == agent) for agent in "abcd"}
        assert rounds == {"a": [1, 2, 3, 4, 5], "b": [1, 2], "c": [1, 2, 3, 4], "d": [1, 2]}


class Twice(Runner):
    async def run(self, episode):
        first, second = episode.agents
        await together(agent.act(agent.prompt, round=1) for agent in (first, second, first))


def test_a_turn_that_is_refused_ends_those_beside_it(recwarn):
    """And leaves none that was never awaited."""
    with pytest.raises(ValueError, match="acts twice in round 1"):
        asyncio.run(
            scripted.play(Twice(Runner.Config("twice")), TASK, ["a", "b"], scripted.scripted(scripted.numbered))
        )
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


class PlaysAnother(Runner):
    """The first agent's branch plays an episode of its own, while the second agent answers three times."""

    async def run(self, episode):
        await together([self.nested(episode.agents[0]), self.thrice(episode.agents[1])])

    async def nested(self, agent):
        await agent.act(agent.prompt)
        await scripted.play(Often(Runner.Config("often")), TASK, ["a"], scripted.scripted(scripted.numbered))
        await agent.act(agent.prompt)

    async def thrice(self, agent):
        for _ in range(3):
            await agent.act(agent.prompt)

    def most_turns(self, agents):
        return dict.fromkeys(agents, 3)


def test_a_branch_goes_on_in_its_own_round_after_an_episode_within_it():
    said = scripted.scripted(scripted.numbered)
    record = asyncio.run(scripted.play(PlaysAnother(Runner.Config("plays_another")), TASK, ["a", "b"], said))
    assert [turn.round for turn in record.turns if turn.agent == "a"] == [1, 2]


@pytest.mark.parametrize(
    ("base", "fact", "value", "expected"),
    [
        (PeerReview, "num_agents", 3, r"tuple\[int, int \| None\], such as \(1, None\), as Runner declares"),
        (PeerReview, "num_agents", ("2", None), r"tuple\[int"),
        (PeerReview, "last_round", 3, r"a method, def last_round\(self, agents"),
        (PeerReview, "votes", "no", "bool, such as False"),
        (PeerReview, "seats", "judge", r"tuple\[str, \.\.\.\]"),
        (PeerReview, "may_end_early", "yes", "bool, or a property"),
        (Learner, "credits", "own", r"tuple\[str, \.\.\.\], such as \(\), as Learner declares"),
        (Learner, "exchange_every", None, "int, or a property"),
        (Game, "team_size", 2, r"tuple\[int, int \| None\], such as \(2, None\), as Game declares"),
        (Environment, "reply", "no", "a method, def reply"),
    ],
)
def test_a_fact_of_another_type_is_named_with_what_was_expected(base, fact, value, expected):
    own = type("Own", (base,), {fact: value, "__module__": "mine"})
    with pytest.raises(ValueError, match=rf"^mine.Own: {fact} = {re.escape(repr(value))}; expected {expected}"):
        check_class(own)


def test_facts_as_they_should_be_pass():
    for facts in ({"num_agents": [2, 4]}, {"num_agents": (3, 3), "votes": True}, {"may_end_early": property(bool)}):
        check_class(type("Own", (PeerReview,), facts | {"default_credit": "team", "__module__": "mine"}))
    check_class(type("Own", (Learner,), {"default_credit": property(str), "credits": ("own",), "__module__": "mine"}))
    for module in (LeaveOneOut, PeerReview, Regret):
        check_class(module)


def test_a_run_with_such_a_runner_is_refused(monkeypatch, compose_config):
    monkeypatch.setattr(PeerReview, "num_agents", 3)
    monkeypatch.setitem(RUNNERS._entries, "peer_review", PeerReview)
    with pytest.raises(ConfigError, match="PeerReview: num_agents = 3; expected tuple"):
        config = compose_config("runner=peer_review", "credit=own", name="marl")
        check_facts(Setup.of(config))
