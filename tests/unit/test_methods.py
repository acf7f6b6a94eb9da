"""From rows and episodes to examples, and from examples to rows."""

import math

import pytest
import torch

from marl.methods import METHODS
from marl.methods.choice import CompareBy, best_episodes, contrasts
from marl.methods.examples import Example, encoded, policy_rows
from marl.types import Score, Turn
from marl.utils.numbers import bounds_of
from tests.builders import Letters, episode, turn_of_ids

SPEAKERS = {"a": ["a"], "b": ["b"]}
SHARED = {"a": ["team"], "b": ["team"]}
ASKED = [{"role": "user", "content": "2 + 2"}]


def method(name, **options):
    cls = METHODS.get(name)
    return cls(cls.Config(name=name, **options))


def texts(examples):
    return [[[(turn.policy, turn.round, turn.text) for turn in side] for side in e.sides] for e in examples]


def written(*scores_by_sample, task="t"):
    """Episodes of text alone, as dumps hold them; a team scores what its first agent does in the last round."""
    records = []
    for sample, scores in enumerate(scores_by_sample):
        record = episode(task, sample, scores)
        for turn in record.turns:
            turn.prompt_ids, turn.response_ids, turn.text = [], [], f"{turn.agent}{turn.round} of {sample}"
        record.score = record.trajectory("a")[-1].score
        records.append(record)
    return records


def test_a_row_is_for_every_agent_or_for_the_one_that_it_names():
    sft = method("sft")
    row = {"prompt": "2 + 2", "answer": "4"}
    assert texts(sft.of_row(row, SPEAKERS)) == [[[("a", 1, "4")]], [[("b", 1, "4")]]]
    assert texts(sft.of_row(row | {"agent": "b"}, SPEAKERS)) == [[[("b", 1, "4")]]]
    assert texts(sft.of_row(row, SHARED)) == [[[("team", 1, "4")]]], "once for a policy that two agents share"
    assert sft.of_row(row, SPEAKERS)[0].sides[0][0].observation == ASKED
    with pytest.raises(ValueError, match="agent='c' is no trained agent; expected one of a, b"):
        sft.of_row(row | {"agent": "c"}, SPEAKERS)


def test_an_agent_has_its_own_prompt_and_answer():
    row = {"prompt": "2 + 2", "answer": {"a": "4", "b": "four"}}
    row["extra_info"] = {"agent_prompts": {"b": [{"role": "user", "content": "two and two"}]}}
    found = method("sft").of_row(row, SPEAKERS)
    assert texts(found) == [[[("a", 1, "4")]], [[("b", 1, "four")]]]
    assert [e.sides[0][0].observation[0]["content"] for e in found] == ["2 + 2", "two and two"]


def test_columns_may_lie_within_others():
    row = {"prompt": ASKED, "reward_model": {"ground_truth": "4"}}
    assert texts(method("sft", answer_key="reward_model.ground_truth").of_row(row, SHARED)) == [[[("team", 1, "4")]]]


@pytest.mark.parametrize(
    "row", [{"prompt": "", "answer": "4"}, {"prompt": "2", "answer": None}, {"prompt": [], "answer": "4"}]
)
def test_a_row_without_text_is_refused(row):
    with pytest.raises(ValueError, match="expected"):
        method("sft").of_row(row, SPEAKERS)


def test_every_message_of_the_assistant_is_trained():
    said = [
        *ASKED,
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]
    (found,) = method("sft").of_row({"messages": said}, SHARED)
    assert texts([found]) == [[[("team", 1, "5"), ("team", 2, "4")]]]
    assert [turn.observation for turn in found.sides[0]] == [said[:1], said[:3]]


def test_pairs_of_rows():
    dpo, row = method("dpo"), {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}
    assert texts(dpo.of_row(row, SHARED)) == [[[("team", 1, "4")], [("team", 1, "5")]]]
    said = [*ASKED, {"role": "assistant", "content": "4"}]
    assert texts(dpo.of_row(row | {"chosen": said}, SHARED)) == texts(dpo.of_row(row, SHARED))
    assert dpo.of_row(row | {"rejected": "4"}, SHARED) == []


def test_best_episodes_are_above_the_threshold_and_the_best_of_their_task():
    records = written([[1], [0]], [[0.2], [0]], [[0.6], [0]], [[1], [0]]) + written([[0.6], [0]], task="u")
    kept = lambda *rule: [(e.task.id, e.sample) for e in best_episodes(records, *rule)]  # noqa: E731
    assert kept(0.6, None) == [("t", 0), ("t", 3), ("t", 2), ("u", 0)]
    assert kept(0.6, 1) == [("t", 0), ("u", 0)] and kept(None, 3) == [("t", 0), ("t", 3), ("t", 2), ("u", 0)]
    records[0].failure = "overflow"
    assert kept(1.0, None) == [("t", 3)]


def test_episodes_are_imitated_whose_team_answer_is_right_whatever_that_pays():
    records = written(*[[[1], [0]]] * 4)
    for record, score in zip(records, [(50.0, None), (2.0, 0.0), (0.2, 1.0), (2.0, None)], strict=True):
        record.score = Score(score[0], "4", acc=score[1], right_at=50.0)
    found = {rule: method("sft", min_score=rule).of_episodes(records, SPEAKERS) for rule in ("right", 2, None)}
    assert method("rft").config.min_score == "right"
    assert {rule: selection.metrics["method/kept_episodes"] for rule, selection in found.items()} == {
        "right": 0.5, 2: 0.75, None: 1.0,
    }  # fmt: skip


def test_a_least_score_is_right_a_number_or_null():
    bound = bounds_of(method("rft").Config)["min_score"]
    assert all(map(bound.takes, ("right", 1, 0.5, None))) and not any(map(bound.takes, ("wrong", True, math.nan, [])))
    assert str(bound) == "expected a finite number, or right, or null"


def test_an_episode_teaches_every_agent_its_own_turns():
    (record,) = written([[1, 1], [0, 0]])
    found = method("sft").of_episodes([record], SPEAKERS)
    assert texts(found.examples) == [
        [[("a", 1, "a1 of 0"), ("a", 2, "a2 of 0"), ("b", 1, "b1 of 0"), ("b", 2, "b2 of 0")]]
    ]
    assert found.metrics == {"method/kept_episodes": 1.0}
    record.turns[0].stop_reason, record.turns[1].trained = "length", False
    only_b = method("sft").of_episodes([record], {"b": ["first", "later"]})
    assert texts(only_b.examples) == [[[("first", 1, "b1 of 0"), ("later", 2, "b2 of 0")]]]
    assert method("sft").of_episodes(written([[0], [1]]), SPEAKERS).examples == []


def test_pairs_are_of_one_task_and_place_with_different_scores():
    """Agent a: 1, 0, .5, 0 in round 1, so that 1 meets the last 0 and .5 the first; b never differs."""
    records = written([[1], [1]], [[0], [1]], [[0.5], [1]], [[0], [1]])
    pairs, without = contrasts(records, SPEAKERS, CompareBy.own, False)
    assert texts(pairs) == [
        [[("a", 1, "a1 of 0")], [("a", 1, "a1 of 3")]],
        [[("a", 1, "a1 of 2")], [("a", 1, "a1 of 1")]],
    ]
    assert without == 1
    team, _ = contrasts(records, SPEAKERS, CompareBy.team, False)
    assert {side[0].agent for pair in team for side in pair.sides} == {"a", "b"}, "b shares the team's score"


def test_a_turns_own_score_is_less_the_penalty_of_its_length():
    """A long right answer that trains with -.5 is rejected beside a short wrong one."""
    long, short = written([[1], [0]], [[0], [0]])
    turn = long.turns[0]
    turn.score = turn.score.for_training(-0.5)
    (pair,), _ = contrasts([long, short], {"a": ["a"]}, CompareBy.own, False)
    assert texts([pair]) == [[[("a", 1, "a1 of 1")], [("a", 1, "a1 of 0")]]]


def test_by_the_teams_score_what_was_not_played_to_its_end_is_no_contrast():
    broken, wrong = written([[0], [0]], [[-1], [0]])
    assert len(contrasts([broken, wrong], {"a": ["a"]}, CompareBy.team, False)[0]) == 1
    broken.failure = "overflow"
    assert contrasts([broken, wrong], {"a": ["a"]}, CompareBy.team, False)[0] == []


def test_other_tasks_rounds_and_agents_are_no_contrast():
    records = written([[1], [0]]) + written([[0], [1]], task="u")
    assert contrasts(records, SPEAKERS, CompareBy.own, False) == ([], 4)
    assert contrasts(written([[1, 0], [1, 0]]), SPEAKERS, CompareBy.own, False) == ([], 4)


def test_episodes_of_other_data_are_no_contrast_under_the_same_ids():
    """Dumps of two runs, whose data have other questions at the same index."""
    records = written([[1], [1]], [[0], [0]])
    object.__setattr__(records[1].task, "messages", [{"role": "user", "content": "3 + 3"}])
    assert contrasts(records, SPEAKERS, CompareBy.own, False) == ([], 4)
    assert len(best_episodes(records, None, 1)) == 2


def test_pairs_may_be_held_to_one_prompt():
    records = written([[1], [1]], [[0], [1]])
    records[0].turns[0].observation = ASKED
    assert len(contrasts(records, SPEAKERS, CompareBy.own, False)[0]) == 1
    assert contrasts(records, SPEAKERS, CompareBy.own, True)[0] == []


def test_what_says_the_same_is_no_pair():
    records = written([[1], [1]], [[0], [1]])
    for record in records:
        record.turns[0].text = "so"
    assert contrasts(records, SPEAKERS, CompareBy.own, False) == ([], 2)


def test_an_opponent_is_rejected_beside_the_datas_answer():
    records = [episode("t", 0, [[1], [0]])]
    object.__setattr__(records[0].task, "extra", {"answer": {"a": "1", "b": "yes"}})
    records[0].turns[1].thought = "no?"
    found = method("spin").of_episodes(records, SPEAKERS)
    assert texts(found.examples) == [[[("b", 1, "yes")], [("b", 1, "0")]]], "a said 1 itself"
    chosen, rejected = (side[0] for side in found.examples[0].sides)
    assert (chosen.thought, rejected.thought) == (None, "no?"), "the opponent's thought is no part of the data's answer"
    assert (
        chosen.prompt_ids == rejected.prompt_ids == [1, 2] and rejected.response_ids == [3] and not chosen.response_ids
    )
    assert found.metrics == {"method/pairs": 1.0, "method/places_without_contrast": 1.0}
    records[0].turns[0].stop_reason = "length"
    assert len(method("spin").of_episodes(records, SPEAKERS).examples) == 2, "what is cut off is rejected too"


def test_an_opponents_answer_may_be_the_ground_truth():
    records = [episode("t", 0, [[0.5], [0]])]
    found = method("spin", answer_key="reward_model.ground_truth").of_episodes(records, SPEAKERS)
    assert [side[0].text for side in found.examples[0].sides] == ["1", "0.5"]


def test_turns_of_text_get_ids_and_played_ones_keep_theirs():
    played = turn_of_ids("a", 1, [5], [6, 7])
    example = encoded(Example(([Turn("a", 1, ASKED[:1], "4", policy="a")], [played])), {"a": Letters()})
    first, second = (side[0] for side in example.sides)
    assert (
        first.prompt_ids == [1, *map(ord, "2 + 2")]
        and first.response_ids == [ord("4"), 0]
        and first.response_mask == [1, 1]
    )
    assert (second.prompt_ids, second.response_ids) == ([5], [6, 7])


def test_rows_know_their_example_and_side():
    pair = lambda one, other: Example(([turn_of_ids("a", 1, [1], one)], [turn_of_ids("a", 1, [1], other)]))  # noqa: E731
    rows = policy_rows([pair([2], [3]), pair([4, 5], [6])], pack=True)["a"]
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[1, 2], [1, 3], [1, 4, 5], [1, 6]]
    assert rows["example"].tolist() == [0, 0, 1, 1] and rows["side"].tolist() == [0, 1, 0, 1]
    assert rows["temperature"].tolist() == [1.0] * 4


def test_packed_turns_share_a_row_and_the_gradient():
    """Two turns of three tokens, and one of another example: each of the 4 trained tokens weighs a fourth, packed or not."""
    side = [turn_of_ids("a", 1, [1], [2, 0]), turn_of_ids("a", 2, [1, 2, 0, 8], [3])]
    examples = [Example((side,)), Example(([turn_of_ids("a", 1, [1], [9])],))]
    packed, apart = (policy_rows(examples, pack)["a"] for pack in (True, False))
    assert len(packed) == 2 and len(apart) == 3
    for rows in (packed, apart):
        gradients, mask = method("sft").gradients(rows).values(), rows["response_mask"].values()
        torch.testing.assert_close(gradients[mask == 1], torch.full((4,), -0.25))
        assert not gradients[mask == 0].any()
    assert packed["responses"].unbind()[0].tolist() == [2, 0, 8, 3]
