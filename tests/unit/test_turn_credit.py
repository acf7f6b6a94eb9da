"""Numbers of every turn in the rollout dump beside its score, and the agents' shares of the credit, by hand."""

import json

import pytest
import torch
from tensordict import TensorDict

from marl.report import dump
from marl.report.dump_writer import turn_numbers
from marl.report.step_metrics import credit_shares
from marl.types import Score
from tests.builders import batch_of, branch, build_learner as build, episode

ALONE = [[1.0, 0.5], [0.25, None]]
"""a speaks twice, b once; a turn of round r has r tokens."""


def column(numbers, key):
    return [[own[key] for own in turns] for turns in numbers]


def credited(learner, batch):
    learner.assign_credit(batch)
    return turn_numbers(batch, learner.credit.of(batch))


def test_a_groups_numbers():
    """Two samples: returns (1.5, .5) and (0, 0) of a, .25 and 0 of b; nobody has values."""
    batch = batch_of(episode("t", 0, ALONE), episode("t", 1, [[0.0, 0.0], [0.0, None]]))
    got = credited(build("grpo", std=False), batch)
    assert column(got, "reward") == [[1.0, 0.5, 0.25], [0, 0, 0]]
    assert column(got, "return") == [[1.5, 0.5, 0.25], [0, 0, 0]]
    assert column(got, "advantage") == [[0.75, 0.25, 0.125], [-0.75, -0.25, -0.125]]
    assert column(got, "value") == [[None] * 3] * 2


@pytest.mark.parametrize("name", ["magrpo", "rae"])
def test_learners_without_a_critic_say_what_they_compare(name):
    batch = batch_of(episode("t", 0, ALONE), episode("t", 1, [[0.0, 0.0], [0.0, None]]))
    got = credited(build(name, "team" if name == "magrpo" else "own"), batch)
    assert column(got, "return")[0] == ([1.125, 0.5, 1.125] if name == "magrpo" else [1.5, 0.5, 0.25])


def test_values_of_turns():
    """GAE with lambda 1: returns 1.5 and .5; advantages are those less the values. Who is not trained is not valued."""
    batch = batch_of(episode("t", 0, ALONE), train_rounds=[1])
    batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.5)
    got = credited(build("ippo", whiten=False), batch)
    assert column(got, "reward") == [[1.0, 0.5, 0.25]], "what each earned, before it is handed on"
    assert column(got, "return") == [[1.5, None, 0.25]]
    assert column(got, "value") == [[0.5, None, 0.5]] and column(got, "advantage") == [[1.0, None, -0.25]]


def test_values_of_tokens():
    """The first token's value and return of a turn, and the mean of its advantages; rows may hold several turns."""
    batch = batch_of(episode("t", 0, ALONE))
    rows = batch.rows["a"]
    for key, numbers in {"values": [0.1, 0.2, 0.3], "returns": [1.0, 2.0, 3.0], "advantages": [5.0, 6.0, 8.0]}.items():
        rows[key] = torch.nested.nested_tensor_from_jagged(torch.tensor(numbers), rows["responses"].offsets())
    got = turn_numbers(batch, batch.scores_ERA)
    assert column(got, "value")[0] == [pytest.approx(0.1), pytest.approx(0.2), None]
    assert column(got, "return")[0] == [1.0, 2.0, None] and column(got, "advantage")[0] == [5.0, 7.0, None]


def test_tokens_that_were_rejected_do_not_count():
    """The first of two tokens of a's second turn, whose advantage and return nobody wrote."""
    batch = batch_of(episode("t", 0, ALONE))
    rows = batch.rows["a"]
    rows["response_mask"] = torch.nested.nested_tensor_from_jagged(torch.tensor([1, 0, 1]), rows["responses"].offsets())
    for key, numbers in {"values": [0.1, 0.2, 0.3], "returns": [1.0, 0.0, 3.0], "advantages": [5.0, 0.0, 8.0]}.items():
        rows[key] = torch.nested.nested_tensor_from_jagged(torch.tensor(numbers), rows["responses"].offsets())
    got = turn_numbers(batch, batch.scores_ERA)
    assert column(got, "value")[0] == [pytest.approx(0.1), pytest.approx(0.3), None]
    assert column(got, "return")[0] == [1.0, 3.0, None] and column(got, "advantage")[0] == [5.0, 8.0, None]


def test_turns_in_no_grid_have_no_numbers_and_alternatives_have():
    record = branch(episode("t", 0, [[1.0], []]), "a", 1, [0.0])
    note = episode("t", 0, [[0.5], []]).turns[0]
    note.kept = note.trained = False
    record.turns.append(note)
    got = credited(build("grpo", std=False), batch_of(record))
    assert column(got, "advantage") == [[0.5, -0.5, None]] and column(got, "reward") == [[1.0, 0.0, None]]


def test_the_dump_holds_them_and_numbers_the_turns(tmp_path):
    records = [episode("t", 0, ALONE), episode("t", 1, [[0.0, 0.0], [0.0, None]])]
    records[0].turns[0].score = Score(1.0, "1", {"return": "a function's own"})
    batch, learner = batch_of(*records), build("grpo", std=False)
    path = dump.write(records, 3, tmp_path, credited(learner, batch))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["turn"] for line in lines] == [1, 2, 3] * 2
    assert [line["return"] for line in lines] == [1.5, 0.5, 0.25, 0, 0, 0]
    assert [line["score"] for line in lines] == [1.0, 0.5, 0.25, 0, 0, 0]
    assert {line["value"] for line in lines} == {None} and lines[1]["advantage"] == 0.25
    plain = [json.loads(line) for line in dump.write(records, 4, tmp_path).read_text().splitlines()]
    assert "advantage" not in plain[0] and plain[3]["turn"] == 1, "validation trains nothing"
    assert len(list(dump.read(path, lambda source, truth: str, lambda source, truth: str))) == 2


def with_advantages(*of_tokens, **options):
    """Two agents, two rounds; a turn of round r has r tokens. ``of_tokens``: an agent's advantages, turn by turn."""
    batch = batch_of(episode("t", 0, [[1, 0], [0, 1]]), **options)
    for rows, values in zip(batch.rows.values(), of_tokens, strict=True):
        rows["advantages"] = torch.nested.nested_tensor_from_jagged(
            torch.tensor(values), offsets=rows["turn_index"].offsets()
        )
    return batch


def test_a_turn_counts_once_however_long_it_is():
    """a: |-1| and the mean of 2 and -4: 1 + 3. b: 1 and 1: 2."""
    batch = with_advantages([-1.0, 2.0, -4.0], [1.0, -1.0, -1.0])
    assert credit_shares(batch, ["a", "b"]) == pytest.approx({"a": 4 / 6, "b": 2 / 6})


def test_turns_that_share_a_row_are_counted_alike():
    batch, offsets = with_advantages([-1.0, 2.0, -4.0], [1.0, -1.0, -1.0]), torch.tensor([0, 5])
    assert batch.rows["a"]["turn_index"].values().tolist() == [0, 2, 2]
    packed = {"turn_index": [0, -1, 2, 2, -1], "advantages": [-1.0, 9.0, 2.0, -4.0, 9.0]}
    columns = {
        key: torch.nested.nested_tensor_from_jagged(torch.tensor(column), offsets=offsets)
        for key, column in packed.items()
    }
    batch.rows["a"] = TensorDict(columns, batch_size=[1])
    assert credit_shares(batch, ["a", "b"]) == pytest.approx({"a": 4 / 6, "b": 2 / 6}), "nor what is no answer"


def test_frozen_agents_have_no_share_and_no_credit_has_no_shares():
    batch = with_advantages([1.0, 1.0, 1.0], [3.0, 3.0, 3.0])
    assert credit_shares(batch, ["a"]) == {"a": 1.0}
    assert credit_shares(with_advantages([0.0] * 3, [0.0] * 3), ["a", "b"]) == {}


def test_shares_of_a_real_learner_sum_to_one():
    batch = batch_of(episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]]))
    build("grpo", "own").assign_credit(batch)
    assert sum(credit_shares(batch, ["a", "b"]).values()) == pytest.approx(1.0)
