"""Runners by transcript: literal messages from scripted agents."""

import asyncio
import itertools
import random

import pytest

from marl.runners import RUNNERS, Instructions, majority, scripted
from marl.types import Task, Turn
from marl.utils.votes import united
from tests.builders import BUILT_IN, QUESTION, build_runner as build, play


def test_debate_transcript():
    record = play(build("debate"), lambda agent, round: {"alice": "4", "carol": "5"}[agent] if round == 1 else "4")
    second = record.trajectory("alice")[1]
    assert second.observation == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "carol answered:\n5\n\nConsider the other answers, then give your updated answer."},
    ]
    assert record.answer == "4"
    assert [(turn.agent, turn.round) for turn in sorted(record.turns, key=lambda t: (t.round, t.agent))] == [
        ("alice", 1),
        ("carol", 1),
        ("alice", 2),
        ("carol", 2),
    ]


def test_debate_of_three_shows_peers_in_a_fixed_order_and_never_oneself():
    runner = build("debate", num_rounds=3, peer_template="{agent}:{text}", separator=" ", instruction="")
    record = play(runner, lambda agent, round: f"{agent}{round}", agents=("a", "b", "c"))
    third = record.trajectory("b")[2].observation
    assert [message["content"] for message in third] == ["2+2?", "b1", "a:a1 c:c1", "b2", "a:a2 c:c2"]
    assert len(record.turns) == 9


def test_every_observation_of_a_debate_begins_with_the_last_one_and_the_answer_to_it():
    record = play(build("debate", num_rounds=4), lambda agent, round: f"{agent}{round}")
    for agent in record.agents:
        turns = record.trajectory(agent)
        for before, after in itertools.pairwise(turns):
            extended = [*before.observation, {"role": "assistant", "content": before.text}]
            assert after.observation[: len(extended)] == extended


def test_single_turn_is_one_turn_an_agent():
    record = play(build("single_turn"), lambda agent, round: "4")
    assert [turn.round for turn in record.turns] == [1, 1] and record.answer == "4"


def test_a_role_comes_after_the_question():
    record = play(build("single_turn"), lambda agent, round: "4", roles={"alice": "Be brief."})
    assert record.trajectory("alice")[0].observation == [{"role": "user", "content": "2+2?\n\nBe brief."}]
    assert record.trajectory("carol")[0].observation == QUESTION


def test_a_private_observation_takes_the_place_of_the_prompt():
    private = {"carol": [{"role": "user", "content": "2+~?"}], "alice": None}
    record = play(build("single_turn"), lambda agent, round: "4", private=private)
    assert record.trajectory("carol")[0].observation[0]["content"] == "2+~?"
    assert record.trajectory("alice")[0].observation[0]["content"] == "2+2?"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_runner_is_a_function_of_the_answers_it_gets(name):
    def script(agent, round, branch=0):
        return str((len(agent) * 7 + round + 3 * branch) % 5)

    runner = build(name)
    high = runner.num_agents[1]
    agents = ("x", "yy", "zzz")[: high if high is not None else 3] if name != "multi_turn" else ("x",)
    runner.check(agents)
    first, second = (play(runner, script, agents=agents, seed=3) for _ in range(2))
    key = lambda turn: turn.place  # noqa: E731
    assert sorted(first.turns, key=key) == sorted(second.turns, key=key)
    assert first.answer == second.answer


def test_ties_are_broken_by_the_seed_and_not_by_the_order_of_agents():
    chosen = {majority(["1", "2"], random.Random(seed)) for seed in range(20)}
    assert chosen == {"1", "2"}
    assert majority(["2", "1"], random.Random(5)) == majority(["1", "2"], random.Random(5))


def test_abstentions_do_not_count():
    assert majority([None, None, "7"], random.Random(0)) == "7"
    assert majority([None, None], random.Random(0)) is None


def test_notations_of_one_answer_are_votes_for_one_answer():
    assert majority(["2", "1/2", "0.5", "2", "50%"], random.Random(0)) == "1/2"
    assert majority(["No", "Yes", "yes", "no", "YES"], random.Random(0)) == "Yes"
    same = [r"\dfrac{1}{2}", r"\frac{1}{2}", "1/2"], ["(1,2)", "(1, 2)"], ["2.0", "2"], ["New York", "new  york"]
    assert all(len(set(united(answers))) == 1 for answers in same)
    other = (
        ["x", "X"],
        ["1/2", "2/1"],
        ["1/0", "0"],
        ["5", "-5"],
        ["Paris", "Pairs"],
        ["12", "1 2"],
        ["x = 1\ny", "X = 1\ny"],
    )
    assert all(len(set(united(answers))) == 2 for answers in other)
    assert united([None, "7", None]) == [None, "7", None]


def test_the_first_failing_agent_ends_the_episode_with_its_own_error():
    def script(agent, round):
        if agent == "carol":
            raise ZeroDivisionError("carol broke")
        return "4"

    with pytest.raises(ZeroDivisionError, match="carol broke"):
        play(build("debate"), script)


def test_an_agent_speaks_once_in_a_round():
    class Twice(RUNNERS.get("single_turn")):
        async def run(self, episode):
            agent = episode.agents[0]
            await agent.act(agent.prompt, round=1)
            await agent.act(agent.prompt, round=1)

    with pytest.raises(ValueError, match="'alice' acts twice in round 1"):
        play(Twice(Twice.Config(name="twice")), lambda agent, round: "4")


def test_a_runner_may_ask_for_a_score_and_it_is_asked_for_once():
    asked = []

    class Asks(RUNNERS.get("single_turn")):
        async def run(self, episode):
            turn = await episode.agents[0].act(episode.agents[0].prompt)
            asked.extend([await episode.score(turn), await episode.score(turn)])
            return episode.answer(turn)

    record = play(Asks(Asks.Config(name="asks")), lambda agent, round: "4")
    assert asked[0] is asked[1] is record.turns[0].score and asked[0].value == 1.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_runner_votes_where_its_options_say_how(name):
    cls = RUNNERS.get(name)
    assert cls.votes == ("decide" in cls.Config.__dataclass_fields__)


def test_a_system_prompt_stands_before_the_task_and_the_role_behind_it():
    question, rows = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Answer in one word."}
    told = Instructions("Be brief.", "You are Alice.")
    assert told.beside([question]) == [
        {"role": "system", "content": "You are Alice."}, {"role": "user", "content": "2+2?\n\nBe brief."},
    ]  # fmt: skip
    assert told.beside([rows, question])[0] == {"role": "system", "content": "You are Alice.\n\nAnswer in one word."}
    assert (
        Instructions().beside([rows, question]) == [rows, question]
        and Instructions("", "x").beside([question])[1] is question
    )


def test_every_turn_of_an_agent_begins_with_its_own_system_prompt():
    told = {"alice": Instructions(system="You are Alice."), "carol": Instructions("Carol speaks.", "You are Carol.")}

    async def generate(agent, observation, round, previous, branch):
        return Turn(agent, round, list(observation), "4")

    task = Task("t", [{"role": "user", "content": "2+2?"}], "4", "x", lambda text: text)
    runner = build("debate", num_rounds=2)
    record = asyncio.run(scripted.play(runner, task, ["alice", "carol"], generate, roles=told))
    assert len(record.turns) == 4
    for turn in record.turns:
        assert turn.observation[0] == {"role": "system", "content": told[turn.agent].system}
        assert [message["role"] for message in turn.observation].count("system") == 1


def test_instruction_variants_are_dealt_out_anew_in_every_sample():
    given = ["Be brief.", "Check {it}.", "Think."]
    runner, agents = build("single_turn", instructions=given), ("a", "b", "c", "d")
    dealt = []
    for seed in range(20):
        record = play(runner, lambda agent, round: "4", agents=agents, seed=seed)
        texts = [record.trajectory(agent)[0].observation[-1]["content"] for agent in agents]
        assert {*texts} == {f"<instruction>{one}</instruction><question>2+2?</question>" for one in given}
        assert texts[3] == texts[0], "more agents than instructions: from the first again"
        again = play(runner, lambda agent, round: "4", agents=agents, seed=seed)
        assert [turn.observation for turn in again.turns] == [turn.observation for turn in record.turns]
        dealt.append(tuple(texts))
    assert len({*dealt}) > 3
    plain = play(build("single_turn"), lambda agent, round: "4", agents=agents)
    assert all(turn.observation == QUESTION for turn in plain.turns)
