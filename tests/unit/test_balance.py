"""Rows among ranks by tokens: every rank has as many rows, nearly as many tokens, and a mini-batch keeps its rows."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import TensorDict

from marl.batch.build import pad_rows
from marl.cluster.worker_group import WorkerGroup, balanced_order, in_given_order
from marl.utils.ragged import jagged
from tests.builders import same_for_all


def tokens(lengths, order, ranks):
    size = len(order) // ranks
    return [sum(lengths[row] for row in order[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def test_two_ranks_by_hand():
    lengths = [9, 8, 2, 1]
    assert tokens(lengths, range(4), 2) == [17, 3]
    order = balanced_order(lengths, 2)
    assert sorted(map(sorted, (order[:2], order[2:]))) == [[0, 3], [1, 2]] and tokens(lengths, order, 2) == [10, 10]


def test_a_mini_batch_keeps_its_rows():
    """Rank 0 has rows 0 to 3, rank 1 rows 4 to 7; the first mini-batch is the first two of each."""
    lengths = [9, 8, 5, 5, 2, 1, 1, 1]
    order = balanced_order(lengths, 2, mini_batches=2)
    assert {*order[:2], *order[4:6]} == {0, 1, 4, 5} and {*order[2:4], *order[6:]} == {2, 3, 6, 7}
    first = [sum(lengths[row] for row in order[start : start + 2]) for start in (0, 4)]
    assert first == [10, 10]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_it_is_an_order_and_is_undone(seedling, ranks, mini_batches, random):
    lengths = [random.choice(seedling) for _ in range(len(seedling) * ranks * mini_batches)]
    order = balanced_order(lengths, ranks, mini_batches)
    assert sorted(order) == list(range(len(lengths)))
    balanced = jagged([[float(row)] * lengths[row] for row in order], torch.float32)
    back = in_given_order(balanced, order, len(lengths) - 1)
    assert [row[0].item() for row in back.unbind()] == list(range(len(lengths) - 1))
    assert back.offsets().diff().tolist() == lengths[:-1]


LENGTHS = (9, 8, 2, 1, 7)


class Ranks:
    world_size, workers = 2, []


def group_of(balance, per_row=1):
    group = WorkerGroup(
        "alice", SimpleNamespace(trainer=SimpleNamespace(balance_batch=balance)), Ranks(), "p", same_for_all(9)
    )
    group.kind, group.ranks_per_row = "policy", per_row
    return group


def rows():
    ids = jagged([[row] * length for row, length in enumerate(LENGTHS)], torch.long)
    return TensorDict({"input_ids": ids, "response_mask": jagged([[1]] * 5, torch.long)}, batch_size=[5])


def test_workers_get_balanced_rows_and_everybody_else_the_order_of_before():
    sent, order = group_of(True)._for_workers(rows())
    lengths = sent["input_ids"].offsets().diff()
    assert sorted(order) == list(range(6)) and abs(int(lengths[:3].sum() - lengths[3:].sum())) <= 6
    padded = pad_rows(rows(), 2)
    assert sent["response_mask"].offsets().diff().sum() == 6 and sent["response_mask"].values().sum() == 5, (
        "one is padding"
    )
    back = in_given_order(sent["input_ids"], order, 5)
    assert torch.equal(back.values(), padded["input_ids"].values()[: sum(LENGTHS)])


@pytest.mark.parametrize("balance,per_row", [(False, 1), (True, 2)])
def test_rows_stay_as_they_are_if_that_is_asked_for_or_ranks_split_every_row(balance, per_row):
    sent, order = group_of(balance, per_row)._for_workers(rows())
    assert order is None and torch.equal(sent["input_ids"].values()[: sum(LENGTHS)], rows()["input_ids"].values())
    back = in_given_order(sent["input_ids"], order, 5)
    assert back.offsets().diff().tolist() == list(LENGTHS)
