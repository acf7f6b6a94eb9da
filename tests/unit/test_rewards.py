import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given, settings, strategies as st

from marl.rewards import (
    Builtin,
    Reward,
    RewardError,
    build_reward,
    builtin_compute_score,
    extractor,
    final_answer,
    hider,
    only_answer,
)
from marl.rewards.answers import last_number, math_answer, program, strict_number, tagged_answer
from marl.rewards.builtin import equal
from marl.rewards.processes import Processes
from marl.types import Score, Task


@pytest.mark.parametrize(
    "text,answer",
    [
        ("so\n#### 18", "18"),
        ("#### 1\n#### 2,000.", "2000"),
        (r"thus \boxed{7}", "7"),
        (r"\boxed{7} #### 8", "8"),
        ("#### -3", "-3"),
        ("eighteen", None),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("#### B", "B"),
        ("#### $1,005", "1005"),
        ("#### 5 apples.", "5"),
        (r"\boxed{unfinished", None),
        ("", None),
        ("#### 35 #### 36", "36"),
        ("#### 18\n####", "18"),
        ("#### -$1,005.50", "-1005.5"),
        ("#### \u221212", "-12"),
        ("#### 18.00", "18"),
        ("#### 007", "7"),
        ("#### -0", "0"),
        ("#### **42**", "42"),
        ("#### 50%", "50%"),
        ("#### 12 km per hour", "12"),
        ("#### 3 million people", "3000000"),
        ("#### 9 AM", "9 am"),
        (r"\boxed{5\,\text{ cm}}", "5"),
        (r"\boxed{5 a}", "5 a"),
        ("#### 5 apples in total", "5"),
        ("#### 2 pi r", "2 pi r"),
        ("#### 12 third graders", "12"),
        ("#### 15 minutes a day", "15"),
        (r"\boxed{5x+3}", "5x+3"),
        (r"\boxed{5 x}", "5 x"),
        (r"\boxed{1,2}", "1,2"),
        (r"\boxed{10:30}", "10:30"),
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text,answer",
    [("#### 35", "35"), ("35", None), ("#### 35 apples", None), ("so #### 35", None), ("#### ~", None), ("", None)],
)
def test_only_answer_allows_nothing_around_it(text, answer):
    assert only_answer(text) == answer


@pytest.mark.parametrize(
    "text,answer",
    [
        ("so\n#### 18", "18"),
        ("#### 1\n#### 2,000", "2000"),
        ("#### 18.", "18."),
        ("#### $18", None),
        ("####18", None),
        (r"\boxed{18}", None),
        ("18 ####", None),
        ("#### 18\n" + "x" * 300, None),
        ("", None),
    ],
)
def test_the_strict_number(text, answer):
    assert strict_number(text) == answer


@settings(deadline=None)
@given(text=st.text(alphabet="#### 123.,-$\nab", max_size=40), padding=st.sampled_from([0, 280, 400]))
def test_the_strict_rule_is_verls(text, padding):
    from verl.utils.reward_score.gsm8k import extract_solution

    for whole in (text + " " * padding, " " * padding + text, f"#### {text}"):
        assert strict_number(whole) == extract_solution(whole, "strict")


@pytest.mark.parametrize(
    "text,answer",
    [
        ("She makes $1,005.50 a day.", "1005.5"),
        ("The answer is 18.", "18"),
        ("16 - 3 - 4 = 9", "9"),
        ("10-3", "3"),
        ("it is -3 degrees", "-3"),
        ("it is \u22123", "-3"),
        ("a loss of -$20", "-20"),
        ("- 5 apples\n- 6 pears", "6"),
        ("1,234,567 and 12,34", "34"),
        ("half: .5", "0.5"),
        ("so 3.5e3 people", "3500"),
        ("so 1 000 people", "1000"),
        ("\uff11\uff14", "14"),
        ("eighteen", None),
        ("", None),
        ("...,,,", None),
    ],
)
def test_the_last_number(text, answer):
    assert last_number(text) == answer


@pytest.mark.parametrize(
    "text,answer",
    [
        ("#### Step 1: add\n" + r"so \boxed{\frac{1}{2}}" + "\n#### Check\nfine", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        ("Answer: 12\nAnswer:  $1,300.", "1300"),
        ("**Answer:** 5", "5"),
        ("#### 7", "7"),
        ("7", None),
        (r"\boxed{}", None),
        ("Answer: Paris.", "Paris"),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{\textbf{no solution.}}", "no solution"),
        (r"\boxed{x\text{ or }y}", r"x\text{ or }y"),
    ],
)
def test_the_mathematical_answer(text, answer):
    assert math_answer(text) == answer


NASTY = {
    "boxes that stay open": r"\boxed{" * 150_000,
    "braces": "{" * 1_000_000,
    "closing": r"\boxed{1" + "}" * 1_000_000,
    "boxed and blanks": r"\boxed" + " " * 1_000_000,
    "hashes": "#" * 1_000_000,
    "hashes and blanks": "####" + " " * 1_000_000,
    "hashes by lines": "####\n" * 200_000,
    "digits": "#### " + "1" * 1_000_000,
    "digits and a letter": r"\boxed{" + "1" * 1_000_000 + "!}",
    "thousands": "#### " + "111," * 250_000 + "x",
    "points": "1." * 500_000,
    "minus signs": "-" * 1_000_000,
    "a long unit": "#### 5 " + "a" * 1_000_000 + "!",
    "many units": "#### 5 " + "km " * 300_000,
    "many magnitudes": "#### 5 " + "million " * 120_000,
    "tags": "<answer>" * 120_000,
    "closing tags": "</answer>" * 120_000,
    "fences": "```python\n" * 100_000,
    "texts": r"\boxed{5" + r"\text{" * 150_000 + "}" * 150_001,
    "blanks after a number": r"\boxed{5" + " " * 1_000_000 + "!}",
    "answers": "answer :" * 120_000,
    "answer and blanks": "answer" + " " * 1_000_000,
    "words": "the answer is " * 70_000,
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize(
    "rule", [only_answer, strict_number, last_number, final_answer, math_answer, program, tagged_answer]
)
def test_a_text_of_a_million_characters_takes_no_time(rule, name):
    started = time.process_time()
    rule(NASTY[name])
    assert time.process_time() - started < 2.0


PROMPT = 'Tom has 18 apples and eats 4. How many are left? Output the final answer after "####".'
CANARIES = {
    "nothing": "",
    "the prompt": PROMPT,
    "the prompt and its mark": f"{PROMPT}\n####",
    "a constant": "#### 0",
    "every number": "".join(f"#### {n}\n" for n in range(40)),
    "every number in one line": "#### " + " ".join(map(str, range(40))),
    "several in a box": r"\boxed{13, 14, 15}",
    "several boxes": r"\boxed{14} \boxed{15}",
    "marks alone": "#### #### ####",
    "a box alone": r"\boxed{}",
    "the answer and more digits": "#### 140",
    "its negative": "#### -14",
    "a decimal": "#### 14.5",
    "a tower of hashes": "#" * 10_000,
    "thousands": "#### 14,000",
    "a set": r"\boxed{\{14,13\}}",
    "an interval": r"\boxed{[0,100]}",
    "a relation": r"\boxed{x<20}",
    "either": r"\boxed{14 \text{ or } 15}",
    "a free variable": r"\boxed{x}",
}


@pytest.mark.parametrize(
    "source,rule",
    [
        ("marl/x", "strict"),
        ("openai/gsm8k", "strict"),
        ("openai/gsm8k", "flexible"),
        ("aime", "strict"),
        ("own/q", "strict"),
    ],
)
def test_texts_without_an_answer_score_zero(source, rule):
    reward = Reward(Builtin(rule))
    for name, text in CANARIES.items():
        score = asyncio.run(reward.judge(Task("t", [], "14", source, extractor(source, rule)), text))
        assert score.value == 0.0, name


GOOD = {
    ("openai/gsm8k", "strict"): ["so 18 - 4 = 14\n#### 14", "#### 14 apples", "#### 3\n#### 14"],
    ("openai/gsm8k", "flexible"): ["#### 14", "It is 14.", "$14.00", r"\boxed{14}", "**14**"],
    ("aime", "strict"): [r"\boxed{14}", "Answer: 14", r"\boxed{14.0}", r"\boxed{\frac{28}{2}}", r"\boxed{x=14}"],
    ("own/q", "strict"): ["So 9 + 5 = 14", "14", "**14**", "A: 14 apples", r"\boxed 14", "It is 1.4e1."],
    ("marl/x", "strict"): ["#### 14"],
}


@pytest.mark.parametrize("source,rule", GOOD)
def test_right_answers_score_one(source, rule):
    reward = Reward(Builtin(rule))
    for text in GOOD[source, rule]:
        score = asyncio.run(reward.judge(Task("t", [], "14", source, extractor(source, rule)), text))
        assert score.value == 1.0, text


UNREADABLE = {r"\frac{", "}{", ""}
"""As truths."""


@pytest.mark.parametrize(
    "answer,truth,equals",
    [
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", r"\frac12", True),
        (r"3\sqrt{2}", r"\sqrt{18}", True),
        ("1+x", "x+1", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        (r"50\%", "50", False),
        ("1,2", "2,1", False),
        ("1, 2 and 3", "3, 2 and 1", False),
        ("1,2", "(2,1)", False),
        ("1,2", "(1, 2)", True),
        ("1, 2 and 3", "1,2,3", True),
        ("10", "10%", False),
        ("10 percent", "10", False),
        ("10 percent", r"10\%", True),
        ("50%", ".5", True),
        (r"50\%", r"\frac{1}{2}", True),
        ("50%", "0.05", False),
        ("1e3", "1000", True),
        ("1e3", "1003", False),
        ("3.5e3", "3500", True),
        ("3.5e-2", "0.035", True),
        ("3.5e3", "3", False),
        (r"6.02\times10^{23}", "6.02e23", True),
        (r"6.02 \times 10^{23}", "6.02e22", False),
        ("6.02 \u00d7 10\u00b2\u00b3", r"6.02\cdot10^{23}", True),
        ("1 000", "1000", True),
        ("1\u202f000\u2009000", "1,000,000", True),
        ("1\u00a0000", "1", False),
        ("\uff11\uff14", "14", True),
        ("\u0661\u0664", "14", True),
        ("\u0661\u066b\u0665", "1.5", True),
        ("\uff0d\uff13", "-3", True),
        ("2 1/2", "2.5", True),
        ("2 1/2", "21/2", False),
        ("(B)", "B", True),
        ("B", "b", False),
        (r"\$18", "18", True),
        (r"90^\circ", "90", True),
        (r"12\text{ cm}", "12", True),
        ("\u22123", "-3", True),
        ("(2,1)", "(1,2)", False),
        ("3.14", r"\pi", False),
        ("Pairs", "Paris", False),
        ("paris", "Paris", True),
        (r"\text{Paris}", "Paris", True),
        (r"\textbf{ paris. }", "Paris.", True),
        ("Yes", r"\mathrm{Yes}", True),
        (r"\text{\textit{no solution}}", "No solution", True),
        (r"\text{decreasing}", "increasing", False),
        ("\u043c\u043e\u0441\u043a\u0432\u0430", "\u041c\u043e\u0441\u043a\u0432\u0430", True),
        ("\u041d\u0435\u0442", "\u043d\u0435\u0442", True),
        ("\u0434\u0430", "\u043d\u0435\u0442", False),
        ("\u0434\u0430", "7", False),
        ("on", "No", False),
        ("No.", "no", True),
        ("BA", "AB", True),
        ("-y+x", "x-y", True),
        ("2024-01-02", "2024-02-01", False),
        ("2024-01-02", "2024-01-02", True),
        (r"\text{2024-01-02}", "2024-01-02.", True),
        ("2021", "2024-02-01", False),
        ("5-3", "2", True),
        (r"\frac{", "3", False),
        ("}{", "3", False),
        ("", "3", False),
    ],
)
def test_equality_of_mathematical_answers(answer, truth, equals):
    assert equal(answer, truth) is equals
    if {answer, truth}.isdisjoint(UNREADABLE):
        assert equal(truth, answer) is equals


@pytest.mark.parametrize(
    "answer,truth,score",
    [
        ("3 billion", "3 million", 0),
        ("3", "3 million", 0),
        ("3 million", "3", 0),
        ("10 million", "10000000", 1),
        ("10^7", "10 million", 1),
        ("1.5 million", "1500000", 1),
        ("2 dozen eggs", "24", 1),
        (r"3\text{ million}", "3", 0),
        (r"\$3", r"\$3\text{ million}", 0),
        ("9 am", "9 pm", 0),
        (r"9\text{ am}", "9 pm", 0),
        ("9", "9 am", 0),
        ("9am", "9 a.m.", 1),
        (r"10:30\text{ a.m.}", "10:30 AM", 1),
        ("10:30 a.m.", "10:30 p.m.", 0),
        ("5 km", "5 cm", 0),
        ("5 m", "5 cm", 0),
        ("5 cm", "5 m", 0),
        ("5m", "5 cm", 0),
        ("5 m", "5 s", 0),
        (r"5\text{ g}", r"5\text{ kg}", 0),
        ("5 m", "5 metres", 1),
        ("5 GB", "5 MB", 0),
        ("5 GB", "5 gigabytes", 1),
        (r"\$5", "5 EUR", 0),
        ("€5", "$5", 0),
        ("$5", "5 dollars", 1),
        ("1A", "A1", 0),
        ("A1", "1A", 0),
        ("a1", "A1", 1),
        ("2x", "x*2", 1),
        ("5 L", "5 litres", 1),
        ("5 h", "5 hours", 1),
        ("5", "5 m", 1),
        ("5km", "5cm", 0),
        (r"5\text{ km}", r"5\text{ cm}", 0),
        (r"5\,\mathrm{km}", "5 kilometers", 1),
        (r"\frac{10}{2} km", "5 cm", 0),
        (r"\frac{10}{2}", "5 km", 1),
        ("5", "5 km", 1),
        ("5 km", "5", 1),
        ("5 square meters", "5 meters", 0),
        ("5 meters squared", "5 square metres", 1),
        (r"12\text{ cm}^2", "12 square centimeters", 1),
        (r"12\text{ cm}^2", r"12\text{ cm}^{3}", 0),
        (r"12\text{ cm}^2", "12", 1),
        ("12 mph", "12 miles per hour", 1),
        ("25 miles an hour", "25 mph", 1),
        ("15 minutes a day", "15 minutes per day", 1),
        ("15 dollars an hour", "15 dollars", 1),
        ("60 miles in one hour", "60 miles", 1),
        ("12 third graders", "12 students", 1),
        ("5 customers in May", "5", 1),
        ("50 percent", "50 dollars", 0),
        ("50 percent", "50%", 1),
        ("30 degrees Celsius", "30 degrees", 1),
        ("2", "2 pi", 0),
        ("2 pi", r"2\pi", 1),
        ("5 a", "5a", 1),
        ("5", "5 a", 0),
        ("5 apples", "5", 1),
        ("5", "5 apples", 1),
        ("5 red apples", "5 apples", 1),
        ("5 x", "5", 0),
        (r"\text{no  solution}", "no solution", 1),
        ("don\u2019t", "don't", 1),
        ("\u662f\u3002", "\u662f", 1),
    ],
)
def test_a_unit_may_be_left_out_but_not_be_another_one(answer, truth, score):
    given = Task("t", [], truth, "own/mine", extractor("own/mine"))
    judged = asyncio.run(Reward(Builtin()).judge(given, rf"\boxed{{{answer}}}"))
    assert judged.value == score


def task(source="marl/smudged_note", truth="35"):
    return Task("t", [], truth, source, extractor(source))


def judge(compute_score, text="#### 35", **options):
    return asyncio.run(Reward(compute_score).judge(task(**options), text))


def test_embedded_tasks_are_matched_exactly():
    assert judge(builtin_compute_score).value == 1.0
    assert judge(builtin_compute_score, "#### 36").value == 0.0
    for canary in ("", "tom has 3 apples", "#### 35 #### 36", "35"):
        assert judge(builtin_compute_score, canary).value == 0.0


def test_other_data_sources_go_to_verls_own_function():
    score = judge(builtin_compute_score, "16 - 3 - 4 = 9\n#### 18", source="openai/gsm8k", truth="18")
    assert (score.value, score.answer) == (1.0, "18")
    assert judge(builtin_compute_score, "#### 17", source="openai/gsm8k", truth="18").value == 0.0


def test_dicts_keep_their_other_keys():
    score = judge(lambda **_: {"score": 0.5, "pred": 12, "format": True})
    assert (score.value, score.answer, dict(score.extra)) == (0.5, "35", {"pred": 12, "format": True})


@pytest.mark.parametrize(
    "acc, right", [(True, True), (1, True), (1.0, True), (False, False), (0.5, False), (None, True)]
)
def test_verls_acc_decides_what_is_right_whatever_the_score(acc, right):
    score = judge(lambda **_: {"score": 87.5, "acc": acc})
    assert (score.value, score.right) == (87.5, right)


@pytest.mark.parametrize("acc", ["yes", 87.5, -1, float("nan"), [1, 0]])
def test_an_acc_that_is_no_share_is_named(acc):
    with pytest.raises(ValueError, match="acc=.* for task t; expected true, false or a number from 0 to 1"):
        judge(lambda **_: {"score": 1, "acc": acc})


def test_a_function_may_be_async():
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 0.25

    assert judge(compute_score).value == 0.25


@pytest.mark.parametrize(
    "returned,error",
    [
        ({"acc": 1}, "without 'score' for task t"),
        ("well done", "returned 'well done' for task t"),
        (None, "returned None"),
        (float("nan"), "returned nan for task t; expected a finite"),
        ({"score": float("inf")}, "finite"),
        (-1e300, "-1e\\+300 for task t; expected a finite number between -1e\\+15 and 1e\\+15"),
        ({"score": 1e308}, "returned 1e\\+308"),
        (10**400, "expected a number or a dict"),
    ],
)
def test_invalid_scores_are_named(returned, error):
    with pytest.raises((TypeError, ValueError), match=error):
        judge(lambda **_: returned)


def test_the_function_of_an_absurd_score_is_named_and_counted(tmp_path, compose_config):
    (tmp_path / "mine.py").write_text("def judge(**_):\n    return 1e300\n")
    config = compose_config(
        f"reward.custom_reward_function.path={tmp_path}/mine.py",
        "reward.custom_reward_function.name=judge",
        "judge.processes=0",
    )
    with ExitStack() as cleanup:
        reward = build_reward(config, cleanup)
        score = asyncio.run(reward.judge_or_fail(task(), "#### 35", 0.0))
    assert f"judge of {tmp_path}/mine.py returned 1e+300 for task t" in score.failure and not score.right
    assert reward.metrics()["reward/errors"] == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_nobody_gives_a_score_that_no_update_can_use(value):
    """Neither a game, nor an agent loop, nor a runner."""
    with pytest.raises(ValueError, match="a score of .*; expected a finite number"):
        Score(value, "4")


def judge_math(run, *texts, truth="14"):
    reward = Reward(Builtin(run=run))
    reward.failures = reward.compute_score.failures

    async def all_at_once():
        task_ = task("HuggingFaceH4/MATH-500", truth)
        return await asyncio.gather(*(reward.judge(task_, text) for text in texts), return_exceptions=True)

    return asyncio.run(all_at_once()), reward.metrics()


@pytest.mark.slow
def test_math_verify_is_killed_when_it_hangs_and_failures_are_counted_apart_from_wrong_answers(monkeypatch):
    monkeypatch.setattr("marl.rewards.builtin.MATH_TIMEOUT_S", 6.0)
    processes, started = Processes(2, timeout_s=1000.0), time.monotonic()
    deep = r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}"
    texts = [r"\boxed{10^{10^{10}}}", r"\boxed{\frac{28}{2}}", r"\boxed{13}", "no idea", deep, r"\boxed{14}"]
    scores, metrics = judge_math(processes.run, *texts)
    processes.stop()
    assert time.monotonic() - started < 90
    assert [score.value for score in scores] == [0, 1, 0, 0, 0, 1]
    outcomes = [score.extra["math_verify"] for score in scores]
    assert outcomes[:4] == ["timeouts", "right", "wrong", "wrong"] and outcomes[4] in ("errors", "deaths", "timeouts")
    failed = {key: value for key, value in metrics.items() if value}
    assert sum(failed.values()) == 2 and set(failed) <= {
        f"reward/math_{kind}" for kind in ("timeouts", "errors", "deaths")
    }


def test_math_verify_works_off_the_main_thread_too():
    """It once raised there, by its use of signals, and every answer was scored 0."""
    with ThreadPoolExecutor(1) as thread:
        (score,), metrics = thread.submit(judge_math, Builtin().run, r"\boxed{\frac{28}{2}}").result()
    assert score.value == 1.0 and not any(metrics.values())


def test_a_missing_math_verify_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (error,), metrics = judge_math(Builtin().run, r"\boxed{3}")
    assert isinstance(error, RewardError) and "pip install 'marl[math]'" in str(error)
    assert metrics["reward/errors"] == 1 and metrics["reward/math_errors"] == 0


def test_a_ground_truth_that_is_no_mathematics_is_an_error_and_no_wrong_answer():
    (error,), _ = judge_math(Builtin().run, r"\boxed{3}", truth="}{")
    assert isinstance(error, RewardError) and "reward_model.ground_truth='}{' cannot be read" in str(error)


@pytest.mark.parametrize(
    "source,rule,text,shown",
    [
        ("marl/x", "strict", "#### 35", "[hidden]"),
        ("openai/gsm8k", "strict", "3 and 4 make 7.\n#### 7", "3 and 4 make 7.\n[hidden]"),
        ("openai/gsm8k", "flexible", "7 is 3 and 4, so 7", "[hidden] is 3 and 4, so [hidden]"),
        ("openai/gsm8k", "flexible", "no number", "no number"),
        ("math", "strict", r"so \boxed{\frac{1}{\boxed{2}}} it is", "so [hidden] it is"),
        ("math", "strict", r"\boxed{1} or \boxed{2", r"[hidden] or \boxed{2"),
        ("math", "strict", "Answer: 5\nbye", "answer: [hidden]\nbye"),
        ("math", "strict", "plain words", "plain words"),
    ],
)
def test_a_text_is_shown_without_its_answer(source, rule, text, shown):
    assert hider(source, rule)(text) == shown


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([r"\boxed{", "}", "{", "#### ", "Answer: ", "7", "-1,005.50", " so ", "\n", "x", "$", "####"]),
        max_size=12,
    ),
    st.sampled_from(
        [
            ("openai/gsm8k", "strict"),
            ("openai/gsm8k", "flexible"),
            ("math", "strict"),
            ("marl/x", "strict"),
            ("own/q", "strict"),
        ]
    ),
)
def test_what_is_hidden_is_not_found_again(parts, kind):
    text, extract, hide = "".join(parts), extractor(*kind), hider(*kind)
    if extract(text) is not None:
        assert extract(hide(text)) != extract(text)
