"""``marl run-one`` with a script: what counts as an answer, and as the right one."""

import asyncio
import sys

import pytest

from marl.commands import run_one
from marl.rewards import AnswerRules, Builtin, Reward
from marl.runners import scripted
from marl.types import Task

SINGLE = ["runner=single_turn", "question=2+2?", "judge.processes=0"]


def scores(capsys, *words):
    """The score of each turn, and the last line: the team's answer beside the right one."""
    assert run_one.main([*SINGLE, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.rpartition("   ")[2] for line in lines if "⟶" in line], lines[-1]


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        *(("4", said) for said in ("4", "4.0", "$4", "'#### 4'", r"'\boxed{4}'")),
        *(("4.10", said) for said in ("4.10", "4.1", "'#### 4.10'")),
        ("1,000", "'1,000'"),
        ("007", "007"),
        ("yes", "yes"),
    ],
)
def test_the_truth_and_an_answer_are_what_was_typed(capsys, truth, answer):
    found, last = scores(capsys, f"truth={truth}", f"answers=[{answer}]")
    assert set(found) == {"[1]"} and last.endswith(f"right: {truth}"), last


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        ("0.5", "So it is 1/2.", 1),
        ("Yes", "yes.", 1),
        ("B", "The answer is (B).", 1),
        ("4", "The answer is 5.", 0),
        ("5 cm", "5 m", 0),
        ("50", "50%", 0),
    ],
)
def test_a_text_scores_as_in_training(capsys, truth, answer, score):
    task = Task("question", [], truth, "question", AnswerRules().extractor("question", truth))
    trained = asyncio.run(Reward(Builtin()).judge(task, answer))
    found, last = scores(capsys, f"truth={truth}", f"answers=['{answer}']")
    assert set(found) == {f"[{trained.value:g}]"} == {f"[{score}]"}
    assert last == f"the team's answer: {trained.answer}   right: {truth}"


def test_a_score_is_priced_as_in_training(capsys):
    found, _ = scores(capsys, "truth=4", "answers=['I do not know what this is about']", "judge.no_answer_score=-0.5")
    assert set(found) == {"[-0.5]"}


def test_texts_are_taken_as_they_are():
    """As LaTeX has them."""
    options = run_one.options_of([r"question='${3 \over 4}$'", r"truth=${x}$", r"answers=['${3 \over 4}$']", "row=2"])
    assert (options.question, options.truth, options.row) == (r"${3 \over 4}$", "${x}$", 2)
    assert options.answers == [r"${3 \over 4}$"]


def test_a_bare_answer_that_is_wrong_counts_in_the_vote(capsys):
    found, last = scores(capsys, "answers=[5]", "truth=4")
    assert set(found) == {"[0]"} and last == "the team's answer: 5   right: 4"


def test_a_bare_answer_is_hidden_as_others_are(capsys):
    assert run_one.main(["runner=debate", "runner.hide_answers=true", "answers=[4,5]"]) == 0
    assert "answered:\n[hidden]" in (said := capsys.readouterr().out) and "answered:\n4" not in said


def test_a_rule_of_ones_own_holds_to_the_letter(capsys):
    found, last = scores(capsys, "+judge.extractors={question: hashes}", "answers=[4]")
    assert set(found) == {"[0]"} and last == "the team's answer: None   right: 4"


@pytest.mark.parametrize(("word", "shown"), [("verbose=false", False), ("verbose=true", True)])
def test_the_transcript_is_not_among_the_lines_of_libraries(capsys, monkeypatch, word, shown):
    def talkative(*_):
        exec(
            "print('memory allocated'); ours()", {"__name__": "verl.utils", "ours": lambda: sys.stdout.write("mine\n")}
        )
        return "4"

    monkeypatch.setattr(scripted, "numbered", talkative)
    assert run_one.main([*SINGLE, word]) == 0
    assert ("memory allocated" in (said := capsys.readouterr().out)) == shown and "mine" in said
