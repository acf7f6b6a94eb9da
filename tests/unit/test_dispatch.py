"""Rows go to the ranks as verl's own dispatch cuts them."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from verl.protocol import BatchData
from verl.utils import tensordict_utils as tu

from marl.cluster.workers.dispatch import for_workers, parts_of
from marl.utils.ragged import jagged


def ragged_rows():
    lengths = [3, 1, 7, 2, 5, 4]
    columns = {key: jagged([range(n) for n in lengths], torch.long) for key in ("input_ids", "responses")}
    columns["advantages"] = jagged([[row + 0.5] * n for row, n in enumerate(lengths)], torch.float32)
    rows = TensorDict({**columns, "temperature": torch.arange(6.0)}, batch_size=[6])
    tu.assign_non_tensor(rows, epochs=1, global_batch_size=5.5, dataloader_kwargs={"shuffle": False})
    return rows


def plain(value):
    return value.to_padded_tensor(-1.0).tolist() if getattr(value, "is_nested", False) else value


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_what_verl_would_send_it(ranks):
    theirs, ours = (
        [pickle.loads(pickle.dumps(part)) for part in parts]
        for parts in (BatchData(ragged_rows()).chunk(ranks), for_workers(ragged_rows(), range(ranks)))
    )
    assert len(ours) == len(theirs) == ranks
    for own, other in zip(ours, theirs, strict=True):
        assert own.batch_size == other.batch_size and set(own.keys()) == set(other.keys())
        for key in sorted(other.keys()):
            if isinstance(other[key], torch.Tensor):
                assert own[key].dtype == other[key].dtype
                assert torch.equal(torch.as_tensor(plain(own[key])), torch.as_tensor(plain(other[key]))), key
            else:
                assert own[key] == other[key], key


def test_a_part_is_sent_without_the_other_rows():
    whole, part = (len(pickle.dumps(for_workers(rows_of_many(), range(ranks))[0])) for ranks in (1, 4))
    assert part < whole / 2


def rows_of_many():
    return TensorDict({"input_ids": jagged([range(200)] * 64, torch.long)}, batch_size=[64])


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 rows do not divide among 4 ranks"):
        parts_of(ragged_rows(), 4)
