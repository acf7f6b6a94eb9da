"""Prediction of peers' turns: what is predicted after what, its loss by hand, and plans made with it in play."""

import asyncio
import itertools
import math

import pytest
import torch

from marl.batch.build import joint_batch
from marl.config.sources import Source
from marl.controller.method_data import read_items
from marl.methods.examples import Example, policy_rows, without_long_turns
from marl.methods.peers import predictions
from marl.report import dump
from marl.report.foresight import foresight_metrics
from marl.runners import RecordedAnswers, scripted
from marl.runners.debate import Order
from marl.types import ContextOverflow, Episode, Score, Task, Turn
from tests.builders import QUESTION, build_runner, play, turn_of_ids
from tests.method_rows import method, rows_of

SPEAKERS = {"a": ["first", "later"], "b": ["b"]}
NEXT = "{agent} ?"


def said(agent, round, text, **marks):
    seen = [{"role": "user", "content": f"{agent} in {round}"}]
    return Turn(agent, round, seen, text, policy=agent, stop_reason="completed", score=Score(0.0, text), **marks)


def team(*turns, agents=("a", "b"), score=0.0):
    record = Episode(Task("t", [], "4", "x", str), 0, list(agents), list(turns))
    record.answer, record.score = "4", Score(score, "4")
    return record


def predicted(record, speakers=SPEAKERS):
    """Every pair's prompts, texts and policies."""
    found = predictions(record, speakers, NEXT)
    return {pair: [(t.observation[0]["content"], t.text, t.policy) for t in side] for pair, side in found.items()}


def test_every_agent_predicts_what_its_peers_say_in_the_same_round():
    record = team(said("a", 1, "a1"), said("b", 1, "b1"), said("a", 2, "a2"), said("b", 2, "b2"))
    assert predicted(record) == {
        ("a", "b"): [("a in 1\n\nb ?", "b1", "first"), ("a in 2\n\nb ?", "b2", "later")],
        ("b", "a"): [("b in 1\n\na ?", "a1", "b"), ("b in 2\n\na ?", "a2", "b")],
    }
    assert record.turns[0].observation == [{"role": "user", "content": "a in 1"}], "nothing is added to what was played"


def test_those_who_speak_in_turn_predict_who_comes_after_them():
    record = team(said("a", 1, "a1"), said("b", 2, "b2"), said("a", 3, "a3"))
    assert predicted(record) == {
        ("a", "b"): [("a in 1\n\nb ?", "b2", "first")],
        ("b", "a"): [("b in 2\n\na ?", "a3", "b")],
    }


def test_untrained_peers_are_predicted_and_predict_nothing_and_cut_turns_are_left_out():
    record = team(said("a", 1, "a1"), said("b", 1, "b1", trained=False), said("a", 2, "a2"), said("b", 2, "b2"))
    record.turns[3].stop_reason = "length"
    assert predicted(record, {"a": ["a"]}) == {("a", "b"): [("a in 1\n\nb ?", "b1", "a")]}
    record.turns[1].kept = False
    assert predicted(record, {"a": ["a"]}) == {}, "an alternative that was dropped was not said"


def test_an_agent_that_predicted_in_play_is_asked_as_it_was_then():
    note = said("a", 1, "b0", kept=False, trained=False, answers=False, branch=-1001, foresees="b")
    note.observation = [{"role": "user", "content": "as asked"}]
    record = team(note, said("a", 1, "a1"), said("b", 1, "b1"))
    assert predicted(record, {"a": ["a"]}) == {("a", "b"): [("as asked", "b1", "a")]}


def read(tmp_path, *records, **options):
    path = dump.write(records, 1, tmp_path)
    made = method("world_model", source=Source.episodes, peers_request=NEXT, **options)
    items = read_items(made, Source.episodes, [str(path)], SPEAKERS, "data.train_files")
    return made, [[[turn.text for turn in side] for side in example.sides] for item in items for example in item]


def test_good_episodes_are_imitated_and_all_are_predicted(tmp_path):
    good = team(said("a", 1, "a1"), said("b", 1, "b1"), score=1.0)
    bad = team(said("a", 1, "x1"), said("b", 1, "y1"))
    made, sides = read(tmp_path, bad, good)
    assert sides == [[["a1", "b1"], ["b1"], ["a1"]], [[], ["y1"], ["x1"]]] and made.pairs == [("a", "b"), ("b", "a")]
    sft = method("sft", source=Source.episodes).of_episodes([bad, good], SPEAKERS).examples
    assert [[[turn.text for turn in side] for side in e.sides] for e in sft] == [[["a1", "b1"]]]


def three_sides():
    """Own log-probs -1, -2 (and -9 masked), predicted ones of the first pair -3, and of the second -4, -6."""
    return rows_of([[-1.0, -2.0, -9.0], [-3.0], [-4.0, -6.0]], [[1, 1, 0], [1], [1, 1]], [0, 0, 1], [0, 1, 2])


def test_the_loss_is_a_mean_over_own_tokens_and_a_weighted_one_over_predicted_tokens():
    """1.5 + .3 (3 + 4 + 6) / 3; by pair 3 and 5."""
    made = method("world_model", peers_weight=0.3)
    made.pairs = [("a", "b"), ("b", "a")]
    torch.testing.assert_close(made.gradients(three_sides()).values(), torch.tensor([-0.5, -0.5, 0, -0.1, -0.1, -0.1]))
    expected = {
        "loss": 1.5 + 0.3 * 13 / 3,
        "perplexity": math.exp(1.5),
        "peers_loss": 13 / 3,
        "peers_loss/a/b": 3,
        "peers_loss/b/a": 5,
    }
    assert made.measure(three_sides()) == pytest.approx(expected, rel=1e-6)
    assert made.compares and not method("sft").compares


def test_without_predicted_turns_it_is_sft_to_the_last_bit():
    rows = rows_of([[-1.0, -2.0, -0.7], [-3.0]], [[1, 1, 1], [1]], [0, 1], [0, 0])
    sft = method("sft", peers_weight=0.0)
    assert torch.equal(method("world_model").gradients(rows).values(), sft.gradients(rows).values())
    assert method("world_model").measure(rows)["loss"] == sft.measure(rows)["loss"]


def test_predicted_turns_share_no_row_with_own_ones():
    own = [turn_of_ids("a", 1, [1], [2])]
    rows = policy_rows([Example((own, [turn_of_ids("a", 1, [1, 2, 7], [3])]))], pack=True)["a"]
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[1, 2], [1, 2, 7, 3]]
    assert [row.tolist() for row in rows["response_mask"].unbind()] == [[1], [1]] and rows["side"].tolist() == [0, 1]


def test_turns_that_no_policy_could_read_are_left_out_and_counted():
    short, long = turn_of_ids("a", 1, [1], [2]), turn_of_ids("a", 1, [1, 1, 1], [2])
    kept, count = without_long_turns([Example(([short], [long])), Example(([], [long]))], {"a": 3})
    assert [e.sides for e in kept] == [([short], [])] and count == 1


def named(agent, round, branch=0):
    return f"{agent}{round}"


def test_an_agent_reads_its_predictions_before_it_answers():
    brief = {"foresee_request": "{agent} ?", "foreseen_template": "{agent} will say {text}", "instruction": ""}
    record = play(build_runner("debate", num_rounds=2, foresee=True, separator=" ", **brief), named)
    notes = [turn for turn in record.turns if turn.foresees]
    assert [(n.agent, n.foresees, n.round) for n in notes] == [
        ("alice", "carol", 1), ("carol", "alice", 1), ("alice", "carol", 2), ("carol", "alice", 2),
    ]  # fmt: skip
    assert notes[0].observation[-1]["content"] == "2+2?\n\ncarol ?"
    first, second = record.trajectory("alice")
    assert first.observation[-1]["content"] == "2+2?\n\ncarol will say alice1"
    assert second.observation[-1]["content"] == "carol answered:\ncarol1\n\ncarol will say alice2"
    assert second.observation[: len(first.observation)] == first.observation, "what comes later extends it"
    assert not any(note.kept or note.trained or note.answers for note in notes)
    assert record.num_rounds == 2 and len({turn.place for turn in record.turns}) == len(record.turns)


def test_pairs_are_numbered_alike_whoever_was_cut_first():
    """A resumed run sees other episodes first than the unbroken one."""
    whole = [said("a", 1, "a1"), said("b", 1, "b1")]
    cut = [said("a", 1, "a1"), said("b", 1, "b1")]
    cut[1].stop_reason = "length"
    sides = []
    for records in ([team(*whole)], [team(*cut), team(*whole)]):
        sft = method("sft", peers_weight=1.0, min_score=None)
        last = sft.of_episodes(records, SPEAKERS).examples[-1]
        sides.append((sft.pairs, [[turn.agent for turn in side] for side in last.sides]))
    assert sides[0] == sides[1] == ([("a", "b"), ("b", "a")], [["a", "b"], ["a"], ["b"]])


def test_without_it_a_debate_is_as_before():
    plain, planned = (play(build_runner("debate", foresee=on), named) for on in (False, True))
    assert [turn.foresees for turn in plain.turns] == [None] * 4 and len(planned.turns) == 8


def test_every_prediction_has_a_place_and_a_seed_of_its_own():
    record = play(build_runner("debate", foresee=True, num_rounds=1), named, agents=("a", "b", "c"))
    notes = [turn for turn in record.turns if turn.foresees]
    assert sorted((note.agent, note.foresees) for note in notes) == list(itertools.permutations("abc", 2))
    assert len({turn.place for turn in record.turns}) == len(record.turns) == 9


@pytest.mark.parametrize("order", Order)
def test_who_has_left_is_not_predicted(order):
    """In turn, nobody after it expects it in the round in which it left either."""
    leaves = build_runner("debate", foresee=True, leave_word="BYE", order=order)
    record = play(leaves, lambda agent, round, branch=0: "4 BYE" if agent == "a" else "4", agents=("a", "b", "c"))
    notes = {(note.agent, note.foresees, note.round) for note in record.turns if note.foresees}
    of_a = {("b", "a", 1), ("c", "a", 1)} if order is Order.simultaneous else set()
    assert {note for note in notes if note[1] == "a"} == of_a
    assert {note[:2] for note in notes if note[2] > 1} >= {("b", "c"), ("c", "b")}


def test_predictions_are_no_part_of_credit_and_training():
    """The grids and the rows of the same episode with and without them are equal."""

    def records():
        own = [turn_of_ids(agent, 1, [1], [2]) for agent in ("a", "b")]
        for turn in own:
            turn.score = Score(1.0, "x")
        note = turn_of_ids("a", 1, [1, 5], [9])
        note.kept = note.trained = note.answers = False
        note.branch, note.foresees, note.score = -1001, "b", Score(1.0, None)
        return team(*own), team(note, *own)

    temperatures = {"a": 1.0, "b": 1.0}
    plain, planned = (joint_batch([record], ["a", "b"], temperatures) for record in records())
    for name in ("spoken_ERA", "trained_ERA", "scores_ERA", "answers_ERA", "lengths_ERA"):
        assert torch.equal(getattr(plain, name), getattr(planned, name)), name
    for policy in ("a", "b"):
        rows = [batch.rows[policy]["input_ids"].unbind() for batch in (plain, planned)]
        assert [row.tolist() for row in rows[0]] == [row.tolist() for row in rows[1]]


def test_a_question_that_is_too_long_is_left_out_and_counted():
    def script(agent, round, observation):
        if agent == "alice" and observation[-1]["content"].endswith("?!"):
            raise ContextOverflow("long")
        return agent

    runner = build_runner("debate", num_rounds=1, foresee=True, foresee_request="{agent} ?!")
    task = Task("t", QUESTION, "4", "x", str)
    record = asyncio.run(scripted.play(runner, task, ["alice", "carol"], scripted.scripted(script)))
    assert [turn.agent for turn in record.turns if turn.foresees] == ["carol"]
    assert record.counts["unread_requests"] == 1 and record.failure is None
    assert record.trajectory("alice")[0].observation == QUESTION
    again = asyncio.run(scripted.play(runner, task, ["alice", "carol"], RecordedAnswers(record)))
    assert [(turn.place, turn.text) for turn in again.turns] == [(turn.place, turn.text) for turn in record.turns]


def test_a_prediction_is_right_if_its_answer_is_the_peers_next():
    def note(agent, peer, round, text):
        return said(agent, round, text, kept=False, trained=False, answers=False, branch=-1000, foresees=peer)

    record = team(
        note("a", "b", 1, "4"), said("a", 1, "4"), said("b", 1, "5"),
        note("a", "b", 2, "5"), said("a", 2, "5"), said("b", 2, "5"), note("b", "a", 2, "5"),
    )  # fmt: skip
    expected = {"foresight": 2 / 3, "foresight/a/b": 0.5, "foresight/b/a": 1.0}
    assert foresight_metrics([record]) == pytest.approx(expected)
    record.turns[2].answers = record.turns[5].answers = False
    assert foresight_metrics([record]) == {"foresight": 1.0, "foresight/b/a": 1.0}, (
        "turns without an answer do not count"
    )
    assert foresight_metrics([team(said("a", 1, "4"))]) == {}


OLD = (
    '{"input": "user: 2+2?", "output": "4", "score": 1.0, "agent": "a", "round": 1, "policy": "a", "stop_reason": "completed", '
    '"version": 1, "seed": 5, "branch": 0, "kept": true, "compared": false, "answers": true, "trained": true, "thought": null, '
    '"messages": [{"role": "user", "content": "2+2?"}], "answer": "4", "reward_failure": null, "turn": 1, "gts": "4", "step": 1, '
    '"task": "t", "data_source": "x", "sample": 0, "team_answer": "4", "team_score": 1.0, "failure": null, "episode": {"agents": '
    '["a"], "seed": 5, "counts": {}, "accuracy": {}, "messages": [{"role": "user", "content": "2+2?"}], "extra_info": {}}}\n'
)


def test_a_dump_from_before_predictions_is_read(tmp_path):
    (tmp_path / "1.jsonl").write_text(OLD)
    (record,) = dump.read(tmp_path / "1.jsonl", lambda source, truth: str, lambda source, truth: str)
    assert [(turn.text, turn.foresees) for turn in record.turns] == [("4", None)]


def test_a_dump_keeps_whom_a_note_foresees(tmp_path):
    record = play(build_runner("debate", foresee=True), named)
    record.score = Score(0.0, None)
    for turn in record.turns:
        turn.score = Score(0.0, None)
    (again,) = dump.read(dump.write([record], 1, tmp_path), lambda source, truth: str, lambda source, truth: str)
    assert [turn.foresees for turn in again.turns] == [turn.foresees for turn in record.turns]
    assert {turn.foresees for turn in again.turns} == {None, "alice", "carol"}
