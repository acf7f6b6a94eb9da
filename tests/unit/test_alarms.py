"""Words about a run that cannot learn."""

import logging

import pytest

from marl.report.alarms import WINDOW, Collapse, DegenerateGroups, LazyAgents, NoAnswers, Overflows, RightThreshold
from marl.types import Episode, Score, Task, Turn


def warnings_of(caplog, steps, *shares):
    alarm = DegenerateGroups(steps)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, share in enumerate(shares, start=1):
            alarm.look(share, step)
    return [record.getMessage() for record in caplog.records]


def test_only_degenerate_groups_for_some_steps_raise_a_warning_with_likely_causes(caplog):
    (said,) = warnings_of(caplog, 3, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert "the last 3 steps, to step 4" in said
    for cause in ("same score", "judge.extractors", "extract(text)", "too easy", "temperature"):
        assert cause in said


@pytest.mark.parametrize(
    "steps,shares,count",
    [
        (3, [1.0, 1.0, 0.99, 1.0, 1.0], 0),
        (2, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0], 2),
        (1, [1.0], 1),
        (None, [1.0] * 9, 0),
    ],
)
def test_one_informative_group_resets_the_count(caplog, steps, shares, count):
    assert len(warnings_of(caplog, steps, *shares)) == count


def step_of(*scores):
    turns = [Turn("a", 1, [], "4", score=score) for score in scores]
    return [Episode(Task("t", [], "4", "x", str), 0, ["a"], turns)]


def said_of(caplog, *steps):
    alarm = RightThreshold()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, episodes in enumerate(steps, start=1):
            alarm.look(episodes, step)
    return [record.getMessage() for record in caplog.records]


def test_rewards_on_another_scale_are_said_once_with_both_remedies(caplog):
    """Nearly all of them: 0 for a text without an answer is on any scale."""
    scale = step_of(Score(0.0, None), *[Score(40.0 + i, "4") for i in range(9)])
    (said,) = said_of(caplog, scale, scale)
    for word in ("step 1", "9 of 10", "judge.right_at=1", "40", "acc"):
        assert word in said


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([-1.0] * 5 + [0.0] * 5, "the scores of 10 texts lie between -1 and 0, below judge.right_at=1"),
        ([0.0] * 3 + [5.0, 50.0] * 3, "scores from 5 to 50 are above judge.right_at=1, and all of them count"),
    ],
)
def test_scores_that_the_threshold_parts_at_the_wrong_place_are_said(caplog, scores, said):
    (line,) = said_of(caplog, step_of(*[Score(score, "4") for score in scores]))
    assert said in line and "set judge.right_at" in line


@pytest.mark.parametrize(
    "scores",
    [
        [Score(1.0, "4")] * 8,  # all right
        [Score(0.0, "5")] * 8,  # all wrong
        [Score(1.1, "4"), Score(1.3, "4"), Score(0.0, "5")] * 3,  # a bonus on what is right
        [Score(0.1, "5"), Score(0.0, None)] * 2 + [Score(1.0, "4")],
        [Score(0.1, "5", acc=0.0), Score(0.0, None, acc=0.0)] * 4,
        [Score(100.0, "4"), Score(0.0, "5")] * 4,  # a scale that the threshold tells apart
        [Score(87.0, "4", acc=0.0)] * 8,
        [Score(87.0, "4", right_at=90)] * 8,
        [Score(87.0, "4", failure="died")] * 8,
        [],
    ],
)
def test_rewards_that_the_threshold_tells_apart_are_no_alarm(caplog, scores):
    assert said_of(caplog, step_of(*scores)) == []


@pytest.mark.parametrize(
    "steps, count",
    [
        ([(0.02, 1.3), (0.5, 0.4), (1.0, 0.0), (1.0, 0.0)], 1),
        ([(1.0, 1.3), (1.0, 0.0)], 0),  # answers of a fixed length, which it has learned by heart
        ([(0.02, 1.3), (0.0, 0.0)], 0),
        ([(0.02, 1.3), (1.0, 1.2)], 0),
        ([(0.02, None), (1.0, None)], 0),  # entropies are not computed
    ],
)
@pytest.mark.parametrize("label", ["alice", "alice/shared"])
def test_a_policy_that_only_repeats_itself_is_said_to_have_collapsed(caplog, steps, count, label):
    alarm = Collapse(["alice"])
    with caplog.at_level(logging.WARNING):
        for step, (truncated, entropy) in enumerate(steps, start=1):
            entropies = {} if entropy is None else {f"agent/{label}/entropy": entropy}
            alarm.look({"agent/alice/truncated": truncated, "agent/carol/entropy": 0.0, **entropies}, step)
    assert len(caplog.records) == count
    assert not count or all(word in caplog.text for word in ("'alice', step 3", "collapsed", "optim.lr", "2 % before"))


def no_answers(caplog, *shares):
    """Lines said of steps of ten texts each, of which so many give no answer."""
    alarm = NoAnswers(lambda task: "prose")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, silent in enumerate(shares, start=1):
            task = Task("t", [], "4", "own/q", str)
            turns = [
                Turn("a", 1, [], "word " * 99 if n < silent else "4", score=Score(0.0, None if n < silent else "4"))
                for n in range(10)
            ]
            alarm.look([Episode(task, 0, ["a"], turns=turns)], step)
    return [record.getMessage() for record in caplog.records]


def test_where_most_texts_give_no_answer_one_line_names_a_text_the_rule_and_its_key(caplog):
    (said,) = no_answers(caplog, 5, 6, 9, 10)
    assert "step 2: 6 of 10 texts give no answer" in said and "word word" in said and " … " in said
    assert "data_source=own/q is read by the rule prose" in said and "judge.extractors={own/q:" in said
    assert len(said) < 700 and "\n" not in said


def test_texts_that_give_answers_again_end_the_silence(caplog):
    assert len(no_answers(caplog, 6, 5, 6)) == 2 and not no_answers(caplog, 0, 5)


def test_a_lazy_agent_is_warned_of_once(caplog):
    lazy = LazyAgents(0.25)  # of an equal share, a half
    with caplog.at_level(logging.WARNING):
        for step in range(1, WINDOW):
            lazy.look({"a": 0.9, "b": 0.1}, step)
        assert not caplog.records, "not before there are so many steps"
        lazy.look({}, WINDOW)
        assert not caplog.records, "a step without credit tells nothing"
        for step in range(WINDOW, 2 * WINDOW):
            lazy.look({"a": 0.9, "b": 0.1}, step)
    (record,) = caplog.records
    assert (
        "agent 'b' got 0.100 of the credit over the last 20 steps, to step 20; an equal share is 0.500"
        in record.message
    )


@pytest.mark.parametrize("fraction,share", [(None, 0.0), (0.25, 0.126)])
def test_agents_with_enough_credit_raise_no_warning(caplog, fraction, share):
    lazy = LazyAgents(fraction)
    with caplog.at_level(logging.WARNING):
        for step in range(3 * WINDOW):
            lazy.look({"a": 1 - share, "b": share}, step)
    assert not caplog.records


def test_the_window_moves(caplog):
    lazy = LazyAgents(0.25)
    with caplog.at_level(logging.WARNING):
        for step in range(WINDOW):
            lazy.look({"a": 0.5, "b": 0.5}, step)
        for step in range(WINDOW):
            lazy.look({"a": 1.0, "b": 0.0}, WINDOW + step)
    (record,) = caplog.records
    assert "to step 35;" in record.message, "when 16 of 20 are 0, the mean is .1; when 15 are, it is .125"


def overflows(caplog, *counts):
    """Lines said of steps of ten conversations each, of which so many overflowed."""
    alarm, message = Overflows(), "agent 'a' was shown 99 tokens in round 3, data.max_prompt_length allows 40"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, count in enumerate(counts, start=1):
            episodes = [Episode(Task(f"t{n}", [], "4", "x", str), 0, ["a"]) for n in range(10)]
            for episode in episodes[:count]:
                episode.failure, episode.failure_message = "overflow", message
            alarm.look(episodes, step)
    return [record.getMessage() for record in caplog.records]


def test_many_conversations_that_outgrow_their_context_are_said_in_the_first_step_by_name(caplog):
    (said,) = overflows(caplog, 2, 5, 10)
    assert said.startswith("step 1: 2 of 10 conversations outgrew their context")
    for word in ("task t0", "agent 'a'", "99 tokens", "data.max_prompt_length", "judge.failure_score"):
        assert word in said
    assert len(overflows(caplog, 2, 1, 2)) == 2, "a new streak"
    assert overflows(caplog, 0, 1) == []
