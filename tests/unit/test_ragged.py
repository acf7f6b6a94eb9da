"""Ragged columns that share their offsets, picked and sent."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from marl.cluster.workers import dispatch
from marl.cluster.workers.dispatch import Parcel
from marl.utils.ragged import jagged, pick_rows

SAID = [[1, 2, 3], [4], [5, 6]]
WHOLE = [[0, 1, 2, 3], [0, 0, 0, 4], [5, 6]]


def rows():
    responses = jagged(SAID, torch.long)
    log_probs = jagged([[-0.5 * x for x in row] for row in SAID], torch.float32, responses.offsets())
    columns = {"responses": responses, "input_ids": jagged(WHOLE, torch.long), "log_probs": log_probs}
    return TensorDict({**columns, "temperature": torch.tensor([1.0, 0.5, 0.25])}, batch_size=[3])


def lists(column):
    return [row.tolist() for row in column.unbind()]


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 0], []])
def test_columns_that_share_their_offsets_are_picked_as_each_would_be(index):
    picked = pick_rows(rows(), torch.tensor(index, dtype=torch.long))
    assert lists(picked["responses"]) == [SAID[i] for i in index]
    assert lists(picked["input_ids"]) == [WHOLE[i] for i in index]
    assert lists(picked["log_probs"]) == [[-0.5 * x for x in SAID[i]] for i in index]
    assert picked["temperature"].tolist() == [[1.0, 0.5, 0.25][i] for i in index]
    assert picked["responses"].offsets() is picked["log_probs"].offsets()


def sent(parcel):
    """Rows as they arrive, and the read-only memory that they came through, as Ray's is."""
    buffers = []
    body = pickle.dumps(parcel, protocol=5, buffer_callback=buffers.append)
    memory = [memoryview(bytes(buffer)).toreadonly() for buffer in buffers]
    return pickle.loads(body, buffers=memory), memory


def test_a_worker_may_write_into_what_it_was_sent():
    own = rows()
    tu.assign_non_tensor(own, epochs=2, dataloader_kwargs={"shuffle": False})
    arrived, memory = sent(Parcel(own))
    before = [bytes(part) for part in memory]
    assert type(arrived) is TensorDict and arrived["epochs"] == 2 and arrived["dataloader_kwargs"] == {"shuffle": False}
    for key in ("responses", "input_ids", "log_probs"):
        assert lists(arrived[key]) == lists(own[key]) and arrived[key].dtype == own[key].dtype
        arrived[key].values().zero_()
    arrived["temperature"].zero_()
    assert [bytes(part) for part in memory] == before and lists(own["responses"]) == SAID
    assert arrived["responses"].offsets() is arrived["log_probs"].offsets()
    assert arrived["responses"].offsets() is not arrived["input_ids"].offsets()


def test_bits_in_bfloat16_arrive_as_they_were():
    """An engine may compute log-probs in it, and numpy does not know it."""
    own = rows()
    own["log_probs"] = torch.nested.nested_tensor_from_jagged(
        own["log_probs"].values().bfloat16() / 3, own["responses"].offsets()
    )
    own["temperature"] = own["temperature"].bfloat16() / 3
    arrived, _ = sent(Parcel(own))
    for one, other in (
        (own["log_probs"].values(), arrived["log_probs"].values()),
        (own["temperature"], arrived["temperature"]),
    ):
        assert other.dtype is torch.bfloat16 and torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert lists(arrived["log_probs"]) == lists(own["log_probs"]) and lists(arrived["responses"]) == SAID


def test_a_part_that_several_workers_read_is_stored_once(monkeypatch):
    stored = []
    monkeypatch.setattr(dispatch.ray, "put", lambda part: stored.append(part) or f"part {len(stored)}")
    three = rows()
    assert dispatch.for_workers(three, [0, 0, 1, 1, 2, 2]) == ["part 1"] * 2 + ["part 2"] * 2 + ["part 3"] * 2
    assert [lists(part.rows["responses"]) for part in stored] == [[row] for row in SAID]
    alone = dispatch.for_workers(three, [2, 0, 1])
    assert [lists(part.rows["responses"]) for part in alone] == [[SAID[i]] for i in (2, 0, 1)] and len(stored) == 3
