"""A conversation's transitions, counted by hand."""

import asyncio
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import marl
from marl.config.schema import JudgeConfig
from marl.controller.scores import priced
from marl.evaluation import statistics
from marl.evaluation.baselines import majority_is_right
from marl.marl_trainer import MARLTrainer
from marl.report import conversation, dump, summary
from marl.report.conversation import agent_metrics, count_metrics, team_metrics
from marl.types import Episode, Score, Task, Turn
from tests.builders import collected, controller


def debate(*answers, truth="1", vote=None):
    """One episode; ``answers``: for each agent its answers by round."""
    record = Episode(Task("t", [], truth, "x", lambda text: text), 0, [f"agent_{i}" for i in range(len(answers))])
    for r in range(len(answers[0])):
        for i, row in enumerate(answers):
            score = Score(float(row[r] == truth), row[r], {"pred": row[r]})
            turn = Turn(f"agent_{i}", r + 1, [{"role": "user", "content": "?"}], str(row[r]), response_ids=[1, 2])
            turn.score, turn.stop_reason = score, "completed"
            record.turns.append(turn)
    record.answer = vote
    record.score = Score(float(vote == truth), vote)
    return record


def test_the_four_transitions_sum_to_one():
    episodes = [debate(["1", "1"], ["2", "1"], vote="1"), debate(["1", "3"], ["3", "3"], vote="3")]
    got = conversation.transitions(episodes)
    assert got == {"wrong_wrong": 0.25, "wrong_right": 0.25, "right_wrong": 0.25, "right_right": 0.25}


def test_a_right_agent_is_swayed_if_it_takes_over_another_answer_that_it_met():
    kept, swayed = debate(["1", "1"], ["2", "2"]), debate(["1", "2"], ["2", "2"])
    confused = debate(["1", "9"], ["2", "2"])  # wrong now, but by itself
    alike = debate(["1", "1"], ["1", "1"])  # met no other answer
    got = conversation.swayed([kept, swayed, confused, alike])
    assert got == {"swayed": pytest.approx(1 / 3), "swayed_count": 3.0}


SCORED = {"4": 80.0, "four": {"score": 20.0, "acc": True}, "5": 40.0, "six": {"score": 95.0, "acc": False}}


def played(tmp_path, *answers, **settings):
    """A debate scored from 0 to 100, with the team's numbers; and the same episode out of its dump."""
    says = dict(zip([(agent, r) for r in (1, 2) for agent in "ab"], answers, strict=True))
    team = controller(
        lambda agent, round, **_: says[agent, round], reward=lambda solution_str, **_: SCORED[solution_str], **settings
    )
    episodes = asyncio.run(team.score(collected(team).episodes, 1))
    (again,) = dump.read(dump.write(episodes, 1, tmp_path), lambda source, truth: str, lambda source, truth: str)
    return episodes[0], again, team


@pytest.mark.parametrize(
    "answers, changes, vote",
    [
        (("5", "5", "4", "4"), {"wrong_right": 1.0}, 1.0),
        (("4", "six", "six", "six"), {"right_wrong": 0.5, "wrong_wrong": 0.5}, 0.0),
        (("four", "5", "four", "four"), {"right_right": 0.5, "wrong_right": 0.5}, 1.0),
        (("4", "4", "5", "5"), {"right_wrong": 1.0}, 0.0),
    ],
)
def test_scores_from_0_to_100_are_right_by_acc_or_threshold_live_and_from_the_dump(tmp_path, answers, changes, vote):
    episode, again, team = played(tmp_path, *answers, right_at=60)
    for seen in (episode, again):
        got = team_metrics([seen])
        assert {name: got[f"transitions/{name}"] for name in changes} == changes and got["vote"] == vote
        assert statistics.accuracy_T([seen]) == [vote] and statistics.pass_of([seen], 1) == vote
        assert majority_is_right([seen]) is bool(vote)
    team.accuracy.update([episode])
    assert team.accuracy.right.total() == sum(turn.correct for turn in episode.turns)
    assert [turn.correct for turn in again.turns] == [turn.correct for turn in episode.turns]


def test_what_the_configuration_puts_in_place_of_a_score_is_never_right():
    settings = JudgeConfig(right_at=60, no_answer_score=70, truncated_score=80)
    whole, cut = Turn("a", 1, [], "4"), Turn("a", 1, [], "4", stop_reason="length")
    assert priced(Score(40.0, None), whole, settings, 9) == Score(70.0, None, acc=0.0, right_at=60)
    assert not priced(Score(99.0, "4", acc=1.0), cut, settings, 9).right
    assert (
        priced(Score(65.0, None), whole, settings, 9).right
        and priced(Score(5.0, None, acc=1.0), whole, settings, 9).value == 5
    )
    assert not Score(99.0, "4", failure="died").right


def test_nothing_but_the_score_itself_says_what_is_right():
    """A comparison with 1 anywhere else would read rewards on another scale as right."""
    files = [
        file
        for kind in ("*.py", "*.tmpl")
        for file in Path(marl.__file__).parent.rglob(kind)
        if file.name != "types.py"
    ]
    compares = re.compile(r"(score\w*|\.value|\"score\"\]|\)\.value) *(>=|>|==) *1(\.0)?\b")
    assert {file.name: found for file in files if (found := compares.search(file.read_text()))} == {}


def test_diversity_of_answers():
    assert conversation.diversity(["1", "1"]) == (0.0, 0.0)
    entropy, disagreement = conversation.diversity(["1", "2", "2", None])
    assert entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4)) and disagreement == pytest.approx(5 / 6)


def test_team_metrics_by_hand():
    episodes = [debate(["1", "1"], ["2", "1"], vote="1"), debate(["2", "2"], ["3", "3"], vote="2")]
    got = conversation.team_metrics(episodes)
    assert got["vote"] == 0.5
    assert (got["accuracy/round_1"], got["accuracy/round_2"], got["gain"]) == (0.25, 0.5, 0.25)
    assert (got["disagreement/round_1"], got["disagreement/round_2"]) == (1.0, 0.5)
    assert got["plurality/round_2"] == 0.5


def lost(sample=0):
    """An episode of which nothing is known."""
    episode = Episode(Task("t", [], "1", "x", str), sample, ["agent_0", "agent_1"], failure="error")
    episode.score = Score(0.0, None, failure="error")
    return episode


def test_a_failed_episode_is_wrong_in_every_accuracy():
    """Three right of six tasks are a half, whatever became of the others."""
    right = [debate(["1", "1"], ["1", "1"], vote="1") for _ in range(3)]
    got = conversation.team_metrics([*right, *(lost() for _ in range(3))])
    names = ("vote", "accuracy/round_1", "accuracy/round_2", "accuracy/final", "plurality/round_1", "plurality/round_2")
    assert {name: got[name] for name in names} == dict.fromkeys(names, 0.5) and got["failed"] == 3.0
    agent = conversation.agent_metrics([*right, *(lost() for _ in range(3))], "agent_1")
    assert agent["accuracy/round_2"] == agent["accuracy/final"] == 0.5
    assert conversation.team_metrics(right)["failed"] == 0.0
    assert conversation.team_metrics([lost()])["vote"] == 0.0, "nobody answered at all"


def test_a_failed_episode_is_wrong_whatever_it_was_paid():
    """A game pays a team for the rounds it played before its context overflowed."""
    ended = debate(["1"], ["1"], vote="1")
    ended.failure, ended.score = "overflow", Score(2.0, None)
    assert conversation.team_metrics([ended, debate(["1"], ["1"], vote="1")])["vote"] == 0.5


def test_alternatives_of_which_none_was_kept_count_as_no_turns():
    ended = debate(["1"], ["0"])
    ended.failure, ended.score = "overflow", Score(0.0, None)
    for turn in ended.turns:
        turn.kept = turn.trained = False
    assert team_metrics([ended])["failed"] == 1.0 and team_metrics([ended])["vote"] == 0.0
    for numbers in (team_metrics([ended]), count_metrics([ended]), agent_metrics([ended], "agent_0")):
        assert all(math.isfinite(value) for value in numbers.values())


def test_what_a_failed_episode_still_said_counts_in_its_round_and_not_at_the_end():
    """Both were right in round 1, and the context overflowed before anybody spoke again."""
    ended, whole = debate(["1"], ["1"]), debate(["1", "2"], ["2", "1"], vote="1")
    ended.failure, ended.score = "overflow", Score(0.0, None)
    got = conversation.team_metrics([ended, whole])
    assert got["accuracy/round_1"] == 0.75 and got["accuracy/round_2"] == 0.25 and got["accuracy/final"] == 0.25
    assert got["plurality/round_2"] <= 0.5 and got["vote"] == 0.5
    agent = conversation.agent_metrics([ended, whole], "agent_1")
    assert (agent["accuracy/round_1"], agent["accuracy/round_2"], agent["accuracy/final"]) == (0.5, 0.5, 0.5)


def test_the_change_of_answers_counts_a_failed_episode_as_the_accuracy_of_last_answers_does():
    """Both episodes were right in both rounds, and the context of one overflowed afterwards."""
    whole, ended = (debate(["1", "1"], ["1", "1"], vote="1") for _ in range(2))
    ended.failure, ended.score = "overflow", Score(0.0, None)
    got = conversation.team_metrics([whole, ended])
    assert (got["accuracy/round_1"], got["accuracy/final"], got["gain"]) == (1.0, 0.5, -0.5)
    assert (got["transitions/right_right"], got["transitions/right_wrong"]) == (0.5, 0.5)
    assert conversation.team_metrics([whole, lost()])["gain"] == 0.0, "what was never said is wrong from the start"
    half = conversation.team_metrics([debate(["2", "1"], ["2", "1"], vote="1"), lost()])
    assert half["gain"] == half["accuracy/final"] - half["accuracy/round_1"] == 0.5


def test_the_final_accuracy_is_of_each_agents_last_answer_whenever_it_was_given():
    """One episode agreed in round 1; of the last round alone speak those who had not."""
    short, long = debate(["1"], ["1"], vote="1"), debate(["2", "2"], ["1", "2"], vote="2")
    got = conversation.team_metrics([short, long])
    assert got["accuracy/round_2"] == 0.0 and got["accuracy/final"] == 0.5 and got["plurality/round_2"] == 0.0
    assert summary.last_accuracy(got) == 0.5
    handed = debate(["1"], vote="1")
    handed.turns[0].answers = False
    assert summary.last_accuracy(conversation.team_metrics([handed])) == 1.0, "no turn is an answer: the team's"
    turned = debate(["2", "1"], ["3", "1"], vote="1")
    assert conversation.team_metrics([short, turned])["plurality/round_2"] == 1.0, "of those who still spoke"


def test_a_dump_holds_failed_episodes_too(tmp_path):
    ended = debate(["1"], ["1"])
    ended.failure, ended.turns[0].score = "overflow", Score(0.0, "1", failure="it died")
    path = dump.write([lost(3), ended], 7, tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["failure"] for line in lines] == ["error", "overflow", "overflow"] and lines[0]["agent"] is None
    first, second = dump.read(path, lambda source, truth: str, lambda source, truth: str)
    assert (first.sample, first.failure, first.turns) == (3, "error", [])
    assert second.failure == "overflow" and second.turns[0].scored.failure == "it died" and len(second.turns) == 2


def test_one_round_has_no_transitions():
    got = conversation.team_metrics([debate(["1"], ["2"], vote="1")])
    assert "gain" not in got and not [key for key in got if key.startswith("transitions")]


def test_agent_metrics_by_hand():
    got = conversation.agent_metrics([debate(["1", "1"], ["2", None], vote="1")], "agent_1")
    assert got["score"] == 0.0 and got["no_answer"] == 0.5 and got["response_length"] == 2.0
    assert conversation.agent_metrics([debate(["1"])], "nobody") == {}


def test_what_is_no_answer_or_was_not_kept_enters_no_accuracy():
    """A critique in round 2, an alternative in round 1: the accuracies and changes are those of the answers."""
    record, plain = debate(["1", "1", "1"], ["2", "2", "1"], vote="1"), debate(["1", "1"], ["2", "1"], vote="1")
    for turn in record.turns:
        turn.answers = turn.round != 2
        turn.round = min(turn.round, 2) if turn.answers else 9
    other = debate(["2"]).turns[0]
    other.kept = other.trained = False
    record.turns.append(other)
    got = conversation.team_metrics([record])
    assert got == conversation.team_metrics([plain])
    agent = conversation.agent_metrics([record], "agent_0")
    assert agent["turns"] == 3 and agent["no_answer"] == 0 and agent["accuracy/round_1"] == 1


def test_prompts_that_extend_the_last_turn_are_counted():
    record = debate(["1", "1", "1"])
    first, second, third = record.turns
    first.prompt_ids, first.response_ids = [1, 2], [3]
    second.prompt_ids, second.response_ids = [1, 2, 3, 4], [5]
    third.prompt_ids = [1, 2, 9, 4, 5]
    assert conversation.agent_metrics([record], "agent_0")["extended_prompts"] == 0.5
    for turn in record.turns:  # as from an endpoint that gives text alone
        turn.prompt_ids, turn.response_ids = [], []
    assert "extended_prompts" not in conversation.agent_metrics([record], "agent_0")
    record.counts["picked"] = 3
    assert conversation.count_metrics([record, debate(["1"])]) == {"picked": 1.5}


def test_a_dump_brings_back_the_episodes(tmp_path):
    records = [debate(["1", "2"], ["2", "2"], vote="2"), debate(["1"], vote="1")]
    records[0].turns[1].kept, records[0].seed = False, 77
    records[0].turns[0].text, records[0].accuracy = "two\u2028lines\x85", {"agent_0": 0.25}
    records[1].turns[0].score = Score(1.0, "1", {"episode": "of a series"})
    path = dump.write(records, 7, tmp_path)
    found = list(dump.read(path, lambda source, truth: lambda text: text, lambda source, truth: lambda text: "hidden"))
    assert found[0].task.hide("x") == "hidden"
    assert [(e.task.id, e.seed, e.answer, e.agents) for e in found] == [
        (e.task.id, e.seed, e.answer, e.agents) for e in records
    ]
    for episode, was in zip(found, records, strict=True):
        assert [(*t.place, t.text, t.kept, t.observation) for t in episode.turns] == [
            (*t.place, t.text, t.kept, t.observation) for t in was.turns
        ]
    path.write_text(path.read_text() + '{"output": "x"}\n')
    with pytest.raises(ValueError, match="line 6.*expected a line that"):
        list(dump.read(path, lambda source, truth: str, lambda source, truth: str))


def test_a_missing_score_is_named():
    episode = debate(["1", "1"])
    episode.turns[0].score = None
    with pytest.raises(ValueError, match="turn of 'agent_0' in round 1 has no score"):
        conversation.team_metrics([episode])


def test_dumps_have_verls_columns_and_ours(tmp_path):
    path = dump.write([debate(["1", "2"], ["2", "2"], vote="2")], 7, tmp_path / "rollouts")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "7.jsonl" and len(lines) == 4
    assert {"input", "output", "gts", "score", "step"} <= set(lines[0])
    assert lines[0]["step"] == 7 and lines[0]["agent"] == "agent_0" and lines[0]["pred"] == "1"
    recounted = sum(line["score"] for line in lines if line["round"] == 1) / 2
    assert recounted == 0.5


def test_summary_and_curves(tmp_path):
    before = conversation.team_metrics([debate(["2", "2"], ["2", "2"], vote="2")])
    after = conversation.team_metrics([debate(["1", "1"], ["2", "1"], vote="1")])
    got = summary.summarise(
        {0: before, 5: after},
        problems=1,
        steps=5,
        seconds=1.234,
        seed=3,
        log_prob_gap_max=1e-6,
        restarts=2,
        sampled_tokens=7,
        learner={"degenerate_groups": 0.25},
        baselines={"solo": {"accuracy": 0.5, "sampled_tokens": 8.0, "degenerate_groups": 0.75}},
    )
    assert got == {
        "problems": 1,
        "steps": 5,
        "seconds": 1.23,
        "restarts": 2,
        "seed": 3,
        "log_prob_gap_max": 1e-6,
        "sampled_tokens": 7,
        "degenerate_groups": 0.25,
        "baselines": {"solo": {"accuracy": 0.5, "sampled_tokens": 8.0, "degenerate_groups": 0.75}},
        "accuracy": {
            "before": {"round_1": 0.0, "round_2": 0.0, "final": 0.0, "vote": 0.0},
            "after": {"round_1": 0.5, "round_2": 1.0, "final": 1.0, "vote": 1.0},
        },
    }
    summary.plot({0: before, 5: after}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert summary.table({0: before, 5: after}, 1).row_count == 10
    headings = {
        (0, 5): ["", "step 0", "step 5", "change"],
        (2, 5): ["", "step 2", "step 5", "change"],
        (5,): ["", "step 5"],
    }
    for steps, expected in headings.items():
        table = summary.table(dict.fromkeys(steps, after), 11)
        assert [column.header for column in table.columns] == expected and table.row_count == 10
        assert ("before and after" in table.title) is (steps == (0, 5)) and "11 validation problems" in table.title
        shown = list(table.columns[1].cells)
        assert shown[0] == "0.500 [0.25, 0.75]" and shown[3] == "1.000 [0.74, 1.00]" and shown[-2] == "0.500", (
            "accuracies alone"
        )
    beside = summary.baseline_table({0: before, 5: after}, 11, got["baselines"], got["sampled_tokens"], 0.25)
    assert [column.header for column in beside.columns] == ["", "accuracy", "sampled tokens", "degenerate groups"]
    assert list(beside.columns[3].cells) == ["0.250", "0.250", "0.750"]
    assert list(beside.columns[1].cells) == ["1.000 [0.74, 1.00]"] * 2 + ["0.500 [0.25, 0.75]"] and list(
        beside.columns[2].cells
    ) == [
        "7",
        "7",
        "8",
    ]


@pytest.mark.parametrize(
    ("held_out", "history"),
    [(["an example"], {0: {"loss": 2.0}, 4: {"loss": 1.0}}), (["an example"], {}), ([], {0: {}})],
)
def test_a_summary_of_what_was_read_counts_the_restarts(tmp_path, held_out, history):
    run = SimpleNamespace(held_out=held_out, history=history, report_folder=tmp_path)
    run.method = SimpleNamespace(offline=True)
    run.step_number, run.config, run.restarts, run.seconds = 4, SimpleNamespace(seed=7), 2, 1e6
    run._write_summary = lambda summary: MARLTrainer._write_summary(run, summary)
    MARLTrainer.summarise(run)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found.pop("seconds") == 1e6
    ends = {"before": {"loss": 2.0}, "after": {"loss": 1.0}} if len(history) == 2 else {}
    assert found == {"steps": 4, "seed": 7, "restarts": 2, **ends}
