import asyncio

import pytest

from marl.rewards import Reward, builtin_compute_score, extractor, final_answer, only_answer
from marl.types import Task


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


def task(source="marl/smudged_note", truth="35"):
    return Task("t", [], truth, source, extractor(source))


def judge(compute_score, text="#### 35", **options):
    return asyncio.run(Reward(compute_score).judge(task(**options), text))


def test_embedded_tasks_are_matched_exactly():
    assert judge(builtin_compute_score).score == 1.0
    assert judge(builtin_compute_score, "#### 36").score == 0.0
    for canary in ("", "tom has 3 apples", "#### 35 #### 36", "35"):
        assert judge(builtin_compute_score, canary).score == 0.0


def test_other_data_sources_go_to_verls_own_function():
    verdict = judge(builtin_compute_score, "16 - 3 - 4 = 9\n#### 18", source="openai/gsm8k", truth="18")
    assert (verdict.score, verdict.answer) == (1.0, "18")
    assert judge(builtin_compute_score, "#### 17", source="openai/gsm8k", truth="18").score == 0.0


def test_dicts_keep_their_other_keys_and_pred_is_the_answer():
    verdict = judge(lambda **_: {"score": 0.5, "pred": 12, "format": True})
    assert (verdict.score, verdict.answer, dict(verdict.extra)) == (0.5, "12", {"pred": 12, "format": True})


def test_a_function_may_be_async():
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 0.25

    assert judge(compute_score).score == 0.25


@pytest.mark.parametrize(
    "returned,error",
    [
        ({"acc": 1}, "without 'score' for task t"),
        ("well done", "returned 'well done' for task t"),
        (None, "returned None"),
        (float("nan"), "returned nan for task t; expected a finite"),
        ({"score": float("inf")}, "finite"),
    ],
)
def test_what_is_no_score_is_named(returned, error):
    with pytest.raises((TypeError, ValueError), match=error):
        judge(lambda **_: returned)
