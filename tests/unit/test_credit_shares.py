"""Shares of the credit, counted by hand."""

import logging

import pytest
import torch
from tensordict import TensorDict

from marl.report.credit_shares import WINDOW, LazyAgents, credit_shares
from tests.builders import batch_of, build_learner as build, episode


def credited(*of_tokens, **options):
    """Two agents, two rounds; a turn of round r has r tokens. ``of_tokens``: an agent's advantages, turn by turn."""
    batch = batch_of(episode("t", 0, [[1, 0], [0, 1]]), **options)
    for rows, values in zip(batch.rows.values(), of_tokens, strict=True):
        rows["advantages"] = torch.nested.nested_tensor_from_jagged(
            torch.tensor(values), offsets=rows["turn_index"].offsets()
        )
    return batch


def test_a_turn_counts_once_however_long_it_is():
    """a: |-1| and the mean of 2 and -4: 1 + 3. b: 1 and 1: 2."""
    batch = credited([-1.0, 2.0, -4.0], [1.0, -1.0, -1.0])
    assert credit_shares(batch, ["a", "b"]) == pytest.approx({"a": 4 / 6, "b": 2 / 6})


def test_turns_that_share_a_row_are_counted_alike():
    batch, offsets = credited([-1.0, 2.0, -4.0], [1.0, -1.0, -1.0]), torch.tensor([0, 5])
    assert batch.rows["a"]["turn_index"].values().tolist() == [0, 2, 2]
    packed = {"turn_index": [0, -1, 2, 2, -1], "advantages": [-1.0, 9.0, 2.0, -4.0, 9.0]}
    columns = {
        key: torch.nested.nested_tensor_from_jagged(torch.tensor(column), offsets=offsets)
        for key, column in packed.items()
    }
    batch.rows["a"] = TensorDict(columns, batch_size=[1])
    assert credit_shares(batch, ["a", "b"]) == pytest.approx({"a": 4 / 6, "b": 2 / 6}), "nor what is no answer"


def test_frozen_agents_have_no_share_and_no_credit_has_no_shares():
    batch = credited([1.0, 1.0, 1.0], [3.0, 3.0, 3.0])
    assert credit_shares(batch, ["a"]) == {"a": 1.0}
    assert credit_shares(credited([0.0] * 3, [0.0] * 3), ["a", "b"]) == {}


def test_shares_of_a_real_learner_sum_to_one():
    batch = batch_of(episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]]))
    build("grpo", "own").assign_credit(batch)
    assert sum(credit_shares(batch, ["a", "b"]).values()) == pytest.approx(1.0)


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
