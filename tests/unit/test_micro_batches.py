"""Micro-batches of sorted rows: cuts, the count that ranks agree on, and rows picked a column at a time."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from marl.batch.rows import rows_of
from marl.platform.micro_batches import agreed_count, cuts, even_cuts, halved, in_order
from marl.utils.ragged import consecutive, jagged, joined, pick, pick_rows

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=60).map(lambda lengths: sorted(lengths, reverse=True))
BUDGETS = st.integers(1, 300)


def sizes(lengths, boundaries, padded):
    """Rows and tokens of every micro-batch."""
    parts = [lengths[start:end] for start, end in pairwise(boundaries)]
    return [(len(part), max(part) * len(part) if padded else sum(part)) for part in parts]


@given(LENGTHS, BUDGETS, st.booleans())
def test_cuts_take_every_row_once_within_the_budget(lengths, budget, padded):
    boundaries = cuts(lengths, budget, padded)
    assert boundaries[0] == 0 and boundaries[-1] == len(lengths) and boundaries == sorted(set(boundaries))
    assert all(tokens <= budget or rows == 1 for rows, tokens in sizes(lengths, boundaries, padded))


@given(LENGTHS, BUDGETS, st.booleans())
def test_no_cut_is_made_before_the_next_row_exceeds_the_budget(lengths, budget, padded):
    boundaries = cuts(lengths, budget, padded)
    for start, end in pairwise(boundaries[:-1]):
        ((_, tokens),) = sizes(lengths, [start, end + 1], padded)
        assert tokens > budget


def test_cuts_by_hand():
    assert cuts([9, 8, 3, 3, 2, 1], 9, padded=True) == [0, 1, 2, 5, 6]
    assert cuts([9, 8, 3, 3, 2, 1], 9, padded=False) == [0, 1, 2, 6]
    assert cuts([20, 4, 4], 9, padded=True) == [0, 1, 3]


@given(LENGTHS, BUDGETS, st.data())
def test_halving_reaches_the_count_and_keeps_every_cut(lengths, budget, data):
    boundaries = cuts(lengths, budget, padded=True)
    count = data.draw(st.integers(len(boundaries) - 1, len(lengths)))
    found = halved(boundaries, count)
    assert len(found) == count + 1 and found == sorted(set(found)) and set(boundaries) <= set(found)
    assert (found[0], found[-1]) == (0, len(lengths))


@given(LENGTHS, BUDGETS, st.booleans(), st.data())
def test_even_cuts_have_the_count_and_no_larger_part_than_greedy_ones(lengths, budget, padded, data):
    greedy = cuts(lengths, budget, padded)
    count = data.draw(st.integers(len(greedy) - 1, len(lengths)))
    found = even_cuts(lengths, budget, padded, count)
    assert len(found) == count + 1 and found == sorted(set(found)) and (found[0], found[-1]) == (0, len(lengths))
    largest = [max(tokens for _, tokens in sizes(lengths, ends, padded)) for ends in (found, greedy)]
    assert largest[0] <= largest[1]


def test_even_cuts_by_hand():
    assert cuts([4] * 9, 32, padded=True) == [0, 8, 9] and even_cuts([4] * 9, 32, True, 2) == [0, 5, 9]
    assert even_cuts([9, 8, 3, 3, 2, 1], 18, True, 2) == [0, 2, 6]
    assert even_cuts([9, 8, 3, 3, 2, 1], 18, True, 4) == [0, 1, 2, 4, 6]


def other_rank(monkeypatch, count, rows):
    def all_reduce(numbers, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        numbers.copy_(torch.maximum(numbers, torch.tensor([count, -rows])))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)


@pytest.mark.parametrize("count,expected", [(2, 3), (3, 3), (5, 5)])
def test_ranks_agree_on_the_most_micro_batches(monkeypatch, count, expected):
    other_rank(monkeypatch, count, rows=8)
    assert agreed_count(3, 8, None) == expected


@pytest.mark.parametrize("count,rows,other", [(3, 8, (1, 2)), (1, 2, (3, 8))])
def test_every_rank_refuses_where_one_has_too_few_rows(monkeypatch, count, rows, other):
    other_rank(monkeypatch, *other)
    with pytest.raises(ValueError, match="needs 3 micro-batches and another has 2 rows.*ppo_max_token_len_per_gpu"):
        agreed_count(count, rows, None)


def sample():
    rows = TensorDict(
        {
            "ids": jagged([[1, 2, 3], [4], [], [5, 6]], torch.long),
            "numbers": jagged([[0.5], [1.5, 2.5], [3.5], []], torch.float32),
            "wide": torch.nested.as_nested_tensor([torch.rand(n, 2) for n in (2, 1, 3, 1)], layout=torch.jagged),
            "dense": torch.arange(8.0).view(4, 2),
        },
        batch_size=[4],
    )
    tu.assign_non_tensor(rows, pad_mode="none", budget=7)
    return rows


def rows_in(rows, key):
    return [row.tolist() for row in rows[key].unbind()]


@pytest.mark.parametrize("index", [[2, 0, 3, 1], [1, 1], [3], [0, 2, 2, 0, 1]])
def test_picked_rows_are_the_rows(index):
    rows = sample()
    picked = pick_rows(rows, torch.tensor(index))
    for key in ("ids", "numbers", "wide", "dense"):
        whole = rows_in(rows, key)
        assert rows_in(picked, key) == [whole[i] for i in index], key
        assert picked[key].dtype == rows[key].dtype
    assert (picked["pad_mode"], picked["budget"], len(picked)) == ("none", 7, len(index))


def test_rows_ragged_in_a_later_axis_are_picked_too():
    """As position ids of images: [B, 4, ragged]."""
    parts = [torch.arange(4 * n).view(4, n) for n in (3, 1, 2)]
    column = torch.nested.nested_tensor_from_jagged(torch.cat(parts, 1), torch.tensor([0, 3, 4, 6]), jagged_dim=2)
    found = pick(column, torch.tensor([2, 0]))
    assert torch.equal(found.values(), torch.cat([parts[2], parts[0]], 1)) and found.offsets().tolist() == [0, 2, 5]
    view = consecutive(TensorDict({"x": column}, batch_size=[3]), 1, 3)["x"]
    assert torch.equal(view.values(), torch.cat(parts[1:], 1)) and view.offsets().tolist() == [0, 1, 3]


def test_consecutive_rows_are_views():
    rows = sample()
    part = consecutive(rows, 1, 3)
    for key in ("ids", "numbers", "wide", "dense"):
        assert rows_in(part, key) == rows_in(rows, key)[1:3], key
    assert part["numbers"].values().data_ptr() == rows["numbers"].values()[1:].data_ptr()
    assert (part["budget"], len(part)) == (7, 2)


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=20), BUDGETS, st.randoms())
def test_outputs_of_micro_batches_return_to_their_rows(rows, budget, draw):
    """Sorted, cut and put in order again, every row is where it was: none is lost, none comes twice."""
    column = jagged(rows, torch.long)
    order = list(range(len(rows)))
    draw.shuffle(order)
    order = torch.tensor(order)
    mixed = pick(column, order)
    boundaries = cuts([max(1, len(row)) for row in sorted(rows, key=len, reverse=True)], budget, padded=True)
    batch = TensorDict({"x": mixed}, batch_size=[len(rows)])
    outputs = [{"x": consecutive(batch, start, end)["x"]} for start, end in pairwise(boundaries)]
    assert [row.tolist() for row in in_order(outputs, order)["x"].unbind()] == rows
    assert [row.tolist() for row in joined([output["x"] for output in outputs]).unbind()] == [
        rows[i] for i in order.tolist()
    ]


def test_picked_rows_are_padded_to_the_longest_of_them():
    """verl pads by the length that the tensor knows; torch takes the sum of all lengths where it knows none."""
    rows = sample()
    for found in (pick_rows(rows, torch.tensor([0, 3, 1])), consecutive(rows, 0, 4)):
        assert found.select("ids").to_padded_tensor()["ids"].shape == (len(found), 3)
    assert joined([rows["ids"], rows["ids"]]).to_padded_tensor(0).shape == (8, 3)


def test_silent_rows_have_empty_masks():
    rows = TensorDict(
        {"response_mask": jagged([[1, 0], [1]], torch.long), "ids": jagged([[3, 4], [5]], torch.long)}, [2]
    )
    found = rows_of(rows, [0, 1, 1, 1], silent=2)
    assert rows_in(found, "response_mask") == [[1, 0], [1], [0], [0]]
    assert rows_in(found, "ids") == [[3, 4], [5], [5], [5]]
    assert rows_in(rows, "response_mask") == [[1, 0], [1]], "the given rows stay as they were"
