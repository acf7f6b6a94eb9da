"""One rule for each data source by which texts give answers: votes, credit, reports and what is hidden go by it."""

import asyncio
import logging
import pickle
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.schema import JudgeConfig
from marl.controller.scores import team_score
from marl.controller.tasks import to_task
from marl.evaluation.ensemble_answers import Ensemble, Play
from marl.preflight.checks import check_scorer
from marl.report import conversation
from marl.rewards import AnswerRules, Builtin, Reward, answer_rules, build_reward, check_extractors, rule_of
from marl.rewards.processes import RewardError, RewardUnavailable
from marl.rewards.rules import unscorable
from marl.runners import RUNNERS, scripted
from marl.types import Task

REWARDS = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info):
    pred = extract(solution_str)
    return {"score": float(pred == ground_truth), "pred": pred}

def extract(text):
    found = re.search(r"RESULT <(\\w+)>", text)
    return found and found[1]

def first_word(text):
    return text.split()[0].upper()
"""
ROW = {"raw_prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "x"}, "extra_info": None}


@pytest.fixture
def config(tmp_path):
    """``config(path=…, **judging)``"""

    def make(text=REWARDS, custom=True, **judging):
        path = tmp_path / "my_rewards.py"
        path.write_text(text)
        node = {"path": str(path) if custom else None, "name": "compute_score"}
        settings = OmegaConf.structured(JudgeConfig(processes=0, **judging))
        return OmegaConf.create({"judge": settings, "reward": {"custom_reward_function": node}})

    return make


def task_of(config, source="mine/words"):
    return to_task(ROW | {"data_source": source}, "train/0", answer_rules(config))


def test_the_rewards_own_extractor_is_everybodys(config):
    """Its answers win the vote, earn the team's credit, and are what reports compare: the vote was dead."""
    settings = config()
    task = task_of(settings)
    runner = RUNNERS.get("debate")(RUNNERS.get("debate").Config(name="debate", num_rounds=1))
    script = scripted.listed(["RESULT <x>", "RESULT <x>", "RESULT <y>"])
    episode = asyncio.run(scripted.play(runner, task, ["a", "b", "c"], scripted.scripted(script)))
    with ExitStack() as cleanup:
        reward = build_reward(settings, cleanup)
        for turn in episode.turns:
            turn.score = asyncio.run(reward.judge(task, turn.text))
    episode.score = team_score(episode)
    assert episode.answer == "x" and episode.scored.value == 1.0
    assert sorted(turn.scored.answer for turn in episode.turns) == ["x", "x", "y"]
    assert conversation.team_metrics([episode])["disagreement/round_1"] == pytest.approx(2 / 3)
    assert task.hide("so RESULT <x> it is x, not exact") == "so RESULT <[hidden]> it is [hidden], not exact"


CASES = {"inputs": ["3\n"], "outputs": ["4\n"]}
PROGRAM = "So:\n```python\nprint(int(input()) + 1)\n```\nThat is it."
SOURCES = {
    "codecontests": (CASES, [PROGRAM, f"Thus {PROGRAM}", "```python\nprint(5)\n```"]),
    "searchR1_nq": (
        {"target": ["Paris"]},
        ["<answer> Paris </answer>", "So <answer>Paris</answer>.", "<answer>Rome</answer>"],
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_answers_that_verl_scores_win_a_vote(source):
    truth, texts = SOURCES[source]
    task = to_task(ROW | {"data_source": source, "reward_model": {"ground_truth": truth}}, "t", AnswerRules())
    runner = RUNNERS.get("debate")(RUNNERS.get("debate").Config(name="debate", num_rounds=1))
    episode = asyncio.run(scripted.play(runner, task, ["a", "b", "c"], scripted.scripted(scripted.listed(texts))))
    for turn in episode.turns:
        turn.score = asyncio.run(Reward(Builtin()).judge(task, turn.text))
    episode.score = team_score(episode)
    assert episode.score.value == 1.0 and task.extract(texts[0]) == task.extract(texts[1]) == episode.answer
    assert [turn.scored.value for turn in episode.turns].count(1.0) == 2


@pytest.mark.parametrize(
    "source,text,answer,shown",
    [
        ("apps", "```python\na\n```\nno:\n```python\nb\n```", "b", "[hidden]\nno:\n[hidden]"),
        ("apps", "a ```python block:\n```python\nb\n```\n", "b", "[hidden]"),
        ("apps", "The ``` fence\n```python\nb\n```\nend", "b", "[hidden]"),
        ("apps", "```cpp\na\n``` so", None, "[hidden]"),
        ("taco", " print(1)\n", "print(1)", "[hidden]"),
        ("taco", "so ```python\nprint(1)", "print(1)", "so [hidden]"),
        ("taco", "print(1)\n```so```", "print(1)", "[hidden]"),
        ("taco", "", None, "[hidden]"),
        ("searchR1_nq", "<answer>a</answer><answer> b\n</answer> <answer>", "b", "[hidden][hidden] <answer>"),
        ("searchR1_nq", "<answer> </answer>", None, "[hidden]"),
        ("searchR1_nq", r"\boxed{7}", None, r"\boxed{7}"),
        ("hiyouga/geometry3k", r"so \boxed{7}", "7", "so [hidden]"),
    ],
)
def test_the_answer_is_what_verl_reads(source, text, answer, shown):
    rules = AnswerRules()
    assert (rules.extractor(source)(text), rules.hider(source)(text)) == (answer, shown)


def test_the_answer_is_the_extractors_and_another_pred_is_warned_of_once(caplog):
    task = Task("train/3", [], "7", "mine", lambda text: None)
    reward = Reward(lambda **_: {"score": 1.0, "pred": 7})
    with caplog.at_level(logging.WARNING):
        scores = [asyncio.run(reward.judge(task, "seven")) for _ in range(2)]
    assert [(v.answer, v.extra["pred"]) for v in scores] == [(None, 7)] * 2
    assert len(caplog.records) == 1
    said = caplog.text
    assert "data_source=mine" in said and "'7'" in said and "export extract(text)" in said and "train/3" in said
    caplog.clear()
    same = Task("train/3", [], "7", "mine", lambda text: "7")
    assert asyncio.run(Reward(lambda **_: {"score": 1.0, "pred": 7}).judge(same, "seven")).answer == "7"
    assert not caplog.records


def test_a_key_comes_before_the_rewards_file_and_the_longest_name_wins(config, tmp_path):
    path = tmp_path / "my_rewards.py"
    chosen = config(extractors={"mine": "math", "mine/words": f"{path}:first_word", "mine/numbers": "flexible"})
    assert task_of(chosen, "mine/words").extract("so it is") == "SO"
    assert task_of(chosen, "mine/numbers").extract("7 of 9") == "9"
    assert task_of(chosen, "mine/numbers").hide("7 of 9") == "7 of [hidden]"
    assert task_of(chosen, "mine/other").extract(r"\boxed{3}") == "3"
    assert task_of(chosen, "other").extract("RESULT <z>") == "z", "the reward's"
    assert task_of(config(custom=False), "openai/gsm8k").extract("#### 1,000") == "1000", "the built-in one"


def test_the_built_in_reward_goes_by_the_key_too(config):
    settings = config(custom=False, extractors={"openai/gsm8k": "math"})
    task = to_task(
        ROW | {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}, "t", answer_rules(settings)
    )
    with ExitStack() as cleanup:
        score = asyncio.run(build_reward(settings, cleanup).judge(task, r"\boxed{4}"))
    assert (score.value, score.answer) == (1.0, "4")


def test_what_writes_answers_in_its_own_way_hides_the_whole_text(config, tmp_path):
    settings = config(extractors={"mine": f"{tmp_path / 'my_rewards.py'}:first_word"})
    assert task_of(settings).hide("so it is") == "[hidden]", "no SO stands in it"


def test_an_extractor_that_raises_costs_the_text_its_answer(config, caplog):
    settings = config(text=REWARDS + "\ndef extract(text):\n    raise IndexError('no word')\n")
    with caplog.at_level(logging.WARNING):
        assert [task_of(settings).extract(text) for text in ("a", "b")] == [None, None]
    assert caplog.text.count("IndexError: no word") == 1


def test_rules_travel_to_other_processes(config):
    rules = answer_rules(config(extractors={"mine/numbers": "flexible"}))
    again = pickle.loads(pickle.dumps([rules.extractor("mine/words"), rules.hider("mine/words")]))
    assert again[0]("RESULT <w>") == "w" and again[1]("RESULT <w>") == "RESULT <[hidden]>"


@pytest.mark.parametrize(
    "value,said",
    [
        ("flexibel", "judge.extractors.mine=flexibel.*expected one of only, strict, flexible.*flexible"),
        ("nowhere.py:f", "judge.extractors.mine=nowhere.py:f: FileNotFoundError"),
        ("HERE:missing", r"defines no such function|missing\(text\)"),
    ],
)
def test_a_rule_that_nobody_knows(config, tmp_path, value, said):
    with pytest.raises(ConfigError, match=said):
        check_extractors(config(extractors={"mine": value.replace("HERE", str(tmp_path / "my_rewards.py"))}))
    check_extractors(config(extractors={"mine": "math"}))


@pytest.mark.parametrize("error", [RewardError, RewardUnavailable])
def test_an_ensemble_outlives_a_text_that_cannot_be_judged(error, caplog):
    class Stands:
        config = OmegaConf.create({"judge": {"failure_score": 0.0, "right_at": 1.0}})
        plays = [Play(Task(f"t{i}", [], "1", "x", str), 0, (), ()) for i in range(2)]

        @staticmethod
        def _text(play, ids, seats):
            return "bad" if ids == [0] else "1"

    async def score(solution_str, **_):
        if solution_str == "bad":
            raise error("it died", "deaths")
        return 1.0

    class Answered:
        def __init__(self, *ids):
            self.token_ids = list(ids)

    with caplog.at_level(logging.WARNING):
        turns = asyncio.run(Ensemble._turns(Stands(), "alice", [Answered(0), Answered(1)], [0], Reward(score)))
    assert [turn.scored.value for turn in turns] == [0.0, 1.0]
    assert "alice: 1 of 2 texts could not be scored" in caplog.text and "task t0: it died" in caplog.text
    if error is RewardUnavailable:
        with pytest.raises(RewardUnavailable, match="it died"):  # of all texts: nothing was measured
            asyncio.run(Ensemble._turns(Stands(), "alice", [Answered(0), Answered(0)], [0], Reward(score)))


def test_rules_are_set_on_the_command_line(compose_config):
    config = compose_config("+judge.extractors={mine: math, openai/gsm8k: my_rewards.py:find}")
    assert dict(config.judge.extractors) == {"mine": "math", "openai/gsm8k": "my_rewards.py:find"}


def test_rules_without_a_configuration_are_the_built_in_ones():
    assert AnswerRules("flexible").extractor("openai/gsm8k")("7 of 9") == "9"
    assert AnswerRules().hider("marl/x")("#### 35") == "[hidden]"


PROGRAM_TESTS = "def check(candidate):\n    assert candidate(2) == 3\n"


@pytest.mark.parametrize(
    "source,truth,why",
    [
        ("openai_humaneval", "x", "programs"),
        ("openai/openai_humaneval", "x", "programs"),
        ("google-research-datasets/mbpp", "x", "programs"),
        ("evalplus/humanevalplus", "x", "programs"),
        ("livecodebench/code_generation_lite", "x", "programs"),
        ("deepmind/code_contests", "x", "programs"),
        ("codeparrot/apps", "x", "programs"),
        ("BAAI/TACO", "x", "programs"),
        ("own/questions", PROGRAM_TESTS, "programs"),
        ("own/questions", "assert add(1, 2) == 3", "programs"),
        ("google/IFEval", "x", "free texts"),
        ("abisee/cnn_dailymail", "x", "free texts"),
        ("facebook/anli", 0, "label"),
        ("nyu-mll/multi_nli", "2", "label"),
        ("google/boolq", "1", "label"),
        ("cais/mmlu", 3, "label"),
        ("facebook/anli", "entailment", ""),
        ("cais/mmlu", "B", ""),
        ("google/boolq", "yes", ""),
        ("codecontests", "{}", ""),
        ("apps", "{}", ""),
        ("own/apps_of_maths", "4", ""),
        ("own/questions", "4", ""),
        ("own/questions", "I assert that it is so", ""),
        ("openai/gsm8k", "4", ""),
        ("own/unlike", "0", ""),
    ],
)
def test_rows_that_no_rule_can_score(source, truth, why):
    assert (why in unscorable(source, truth)) if why else not unscorable(source, truth)


def test_such_rows_are_refused_at_the_start_with_the_remedy(config, monkeypatch):
    monkeypatch.setattr("marl.preflight.checks.answers_only", lambda config: False)

    def check(**settings):
        runner = SimpleNamespace(scores_turns=False)
        row = Task("train/3", [], PROGRAM_TESTS, "openai_humaneval", str)
        check_scorer(SimpleNamespace(config=config(**settings), runner=runner), [row])

    with pytest.raises(
        ConfigError, match="data_source=openai_humaneval, train/3.*have to be run.*custom_reward_function"
    ):
        check(custom=False)
    check()
    check(custom=False, extractors={"openai_humaneval": "prose"})


def test_only_competition_mathematics_keeps_the_strict_rule():
    text = "So 9 + 5 = 14"
    taken = {"own/q": "14", "mathqa": "14", "mine": "14", "math": None, "HuggingFaceH4/MATH-500": None, "aime24": None}
    assert {source: AnswerRules().extractor(source, "14")(text) for source in taken} == taken
    assert AnswerRules(by_source={"own/": "math"}).extractor("own/q", "14")(text) is None
    assert rule_of(AnswerRules().extractor("own/q")) == "prose" and rule_of(AnswerRules().extractor("math")) == "math"


@pytest.mark.parametrize("truth", [["32", "thirty two"], {"target": "32"}, []])
def test_a_truth_of_several_parts_is_refused_where_built_in_rules_score(config, monkeypatch, truth):
    """They compare its text, which nobody says. A list of one is that one; verl's own functions and one's own take anything."""
    runner, task = SimpleNamespace(scores_turns=False), Task("t/0", [], truth, "own/q", str)
    monkeypatch.setattr("marl.preflight.checks.answers_only", lambda config: False)
    setup = SimpleNamespace(config=config(custom=False), runner=runner)
    with pytest.raises(ConfigError, match="own/q, t/0: the ground_truth is .*expected one text or number"):
        check_scorer(setup, [task])
    searched = replace(task, data_source="searchR1_nq")
    check_scorer(setup, [searched, replace(task, ground_truth=["32"]), replace(task, ground_truth=32)])
