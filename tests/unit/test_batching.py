import torch
from tensordict import TensorDict

from marl.batch.build import joint_batch, pad_rows, to_rows
from marl.batch.rows import drop_rejected, rows_of
from marl.cluster.critic_group import with_loss_mask
from marl.cluster.worker_group import even_mini_batches
from marl.cluster.workers.policy_worker import of_responses
from marl.learners.trajectories import Decisions
from marl.types import Episode, Score, Task
from marl.utils.ragged import jagged
from tests.builders import episode_of_turns, turn_of_ids


def test_grids_and_rows():
    one = episode_of_turns(
        turn_of_ids("b", 1, [1, 2, 3], [4]),
        turn_of_ids("a", 1, [1, 2], [5, 6]),
        turn_of_ids("a", 2, [1, 2, 5, 6, 7], [8]),
    )
    two = episode_of_turns(turn_of_ids("a", 1, [9], [9, 9]), turn_of_ids("b", 1, [9], [9]))
    batch = joint_batch([one, two], ["a", "b"], {"a": 1.0, "b": 0.7})
    assert batch.mask_ERA.tolist() == [[[True, True], [True, False]], [[True, True], [False, False]]]
    torch.testing.assert_close(batch.scores_ERA[0], torch.tensor([[0.1, 0.1], [0.2, 0.0]], dtype=torch.float64))
    rows = batch.rows["a"]
    assert [r.tolist() for r in rows["input_ids"].unbind()] == [[1, 2, 5, 6], [1, 2, 5, 6, 7, 8], [9, 9, 9]]
    assert [r.tolist() for r in rows["position_ids"].unbind()] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2]]
    assert [r.tolist() for r in rows["turn_index"].unbind()] == [[0, 0], [2], [4, 4]]
    assert batch.rows["b"]["temperature"].tolist() == [torch.tensor(0.7).item()] * 2


def test_agents_that_share_a_policy_share_its_rows():
    record = episode_of_turns(turn_of_ids("a", 1, [1], [2], "both"), turn_of_ids("b", 1, [3], [4], "both"))
    batch = joint_batch([record], ["a", "b"], {"a": 1.0, "b": 1.0})
    assert list(batch.rows) == ["both"] and len(batch.rows["both"]) == 2


def test_a_frozen_agent_has_no_rows():
    record = episode_of_turns(turn_of_ids("a", 1, [1], [2]), turn_of_ids("b", 1, [3], [4]))
    assert list(joint_batch([record], ["a", "b"], {"a": 1.0}).rows) == ["a"]


def test_tool_output_belongs_to_no_turn():
    rows = to_rows([[(turn_of_ids("a", 1, [1], [2, 3, 4], mask=[1, 0, 1]), 6)]], {"a": 1.0})
    assert rows["turn_index"].values().tolist() == [6, -1, 6]
    assert rows["loss_mask"].values().tolist() == [1, 0, 1]


def test_padding_repeats_the_last_row_with_nothing_to_learn():
    rows = to_rows(
        [
            [(turn_of_ids("a", 1, [1, 2], [3]), 0)],
            [(turn_of_ids("a", 1, [4], [5, 6]), 1)],
            [(turn_of_ids("a", 2, [7], [8]), 2)],
        ],
        {"a": 1.0},
    )
    padded = pad_rows(rows, 2)
    assert len(padded) == 4 and pad_rows(rows, 3) is rows
    assert [r.tolist() for r in padded["input_ids"].unbind()][2:] == [[7, 8], [7, 8]]
    assert [r.tolist() for r in padded["loss_mask"].unbind()] == [[1], [1, 1], [1], [0]]


def test_rows_are_picked_in_any_order_and_copied():
    rows = TensorDict({"x": jagged([[1, 2, 3], [], [4, 5]], torch.long), "y": torch.tensor([7, 8, 9])}, batch_size=[3])
    picked = rows_of(rows, [2, 0, 1, 2])
    assert [r.tolist() for r in picked["x"].unbind()] == [[4, 5], [1, 2, 3], [], [4, 5]]
    assert picked["y"].tolist() == [9, 7, 8, 9]
    picked["x"].values()[:] = 0
    assert rows["x"].values().tolist() == [1, 2, 3, 4, 5]


def test_outputs_are_cut_to_the_responses_shifted_by_one():
    rows = to_rows(
        [[(turn_of_ids("a", 1, [1, 2, 3], [4, 5]), 0)], [(turn_of_ids("a", 1, [6], [7, 8, 9]), 1)]], {"a": 1.0}
    )
    whole = jagged([[0, 1, 2, 3, 4], [10, 11, 12, 13]], torch.float32)
    got = of_responses(whole, rows)
    assert [r.tolist() for r in got.unbind()] == [[2, 3], [10, 11, 12]]


def test_no_mini_batch_holds_nothing_but_padding():
    """Else its loss would be 0 / 0."""
    for rows in range(1, 40):
        for wanted in (1, 2, 3, 8):
            for ranks in (1, 2, 4):
                count = even_mini_batches(rows, wanted, ranks)
                size = -(-rows // (count * ranks)) * ranks
                assert 1 <= count <= wanted and (count - 1) * size < rows
    assert even_mini_batches(32, 8, 1) == 8 and even_mini_batches(9, 8, 1) == 5


def test_turns_that_extend_one_another_share_a_row():
    """Turns in between are in the sequence, masked out; a turn that starts anew has a row of its own."""
    record = episode_of_turns(
        turn_of_ids("a", 1, [1, 2], [3, 4]),
        turn_of_ids("b", 1, [8], [9]),
        turn_of_ids("a", 2, [1, 2, 3, 4, 9, 9], [5]),
        turn_of_ids("a", 3, [7, 7], [6]),
        turn_of_ids("b", 2, [8, 9], [9], policy="other"),
    )
    batch = joint_batch([record], ["a", "b"], {"a": 1.0, "b": 1.0}, pack_turns=True)
    rows = batch.rows["a"]
    assert [r.tolist() for r in rows["input_ids"].unbind()] == [[1, 2, 3, 4, 9, 9, 5], [7, 7, 6]]
    assert [r.tolist() for r in rows["prompts"].unbind()] == [[1, 2], [7, 7]]
    assert [r.tolist() for r in rows["response_mask"].unbind()] == [[1, 1, 0, 0, 1], [1]]
    assert [r.tolist() for r in rows["turn_index"].unbind()] == [[0, 0, -1, -1, 2], [4]]
    assert [r.tolist() for r in rows["rollout_log_probs"].unbind()] == [[-0.5, -0.5, 0.0, 0.0, -0.5], [-0.5]]
    assert len(batch.rows["b"]) == len(batch.rows["other"]) == 1, "another policy's ids are not continued"
    apart = joint_batch([record], ["a", "b"], {"a": 1.0, "b": 1.0})
    assert len(apart.rows["a"]) == 3


def test_padding_of_value_rows_has_nothing_to_learn_either():
    """Nor does it count in what the loss is averaged over."""
    rows = with_loss_mask(
        TensorDict(
            {
                "input_ids": jagged([[1, 2, 3], [4, 5]], torch.long),
                "read_at": jagged([[0, 2], [1]], torch.long),
                "value_mask": jagged([[1, 1], [1]], torch.long),
            },
            batch_size=[2],
        )
    )
    padded = pad_rows(rows, 4)
    for key in ("value_mask", "loss_mask"):
        assert [r.tolist() for r in padded[key].unbind()] == [[1, 1], [1], [0], [0]]


def test_rows_of_which_nothing_is_kept_are_left_out():
    """A mini-batch of them alone would have a loss of 0 / 0; the critic and the estimate do not count them."""
    record = episode_of_turns(
        turn_of_ids("a", 1, [1], [2, 2]), turn_of_ids("a", 2, [3], [4]), turn_of_ids("b", 1, [5], [6])
    )
    batch = joint_batch([record], ["a", "b"], {"a": 1.0, "b": 1.0})
    batch.rows["a"]["response_mask"] = jagged([[0, 1], [0]], torch.long)
    batch.rows["b"]["response_mask"] = jagged([[0]], torch.long)
    drop_rejected(batch)
    assert list(batch.rows) == ["a"] and [r.tolist() for r in batch.rows["a"]["input_ids"].unbind()] == [[1, 2, 2]]
    assert batch.trained_ERA.tolist() == [[[True, False], [False, False]]]


def test_a_turn_that_was_rejected_is_not_trained_though_its_row_is():
    """Turns of 2, 1 and 2 tokens in one row, of which one survives in the first and one in the last: those two are trained,
    with what is left of them; the one in between has no place in the row any more."""
    record = episode_of_turns(
        turn_of_ids("a", 1, [1], [2, 3]),
        turn_of_ids("a", 2, [1, 2, 3, 9], [4]),
        turn_of_ids("a", 3, [1, 2, 3, 9, 4, 9], [5, 6]),
    )
    batch = joint_batch([record], ["a", "b"], {"a": 1.0}, pack_turns=True)
    rows = batch.rows["a"]
    assert rows["turn_index"].values().tolist() == [0, 0, -1, 2, -1, 4, 4]
    rows["response_mask"] = jagged([[0, 1, 0, 0, 0, 1, 0]], torch.long)
    drop_rejected(batch)
    assert batch.trained_ERA[0, :, 0].tolist() == [True, False, True]
    assert rows["turn_index"].values().tolist() == [0, 0, -1, -1, -1, 4, 4]
    assert [r.tolist() for r in batch.rows["a"]["response_mask"].unbind()] == [[0, 1, 0, 0, 0, 1, 0]]
    batch.critic_data.values_ERA = torch.tensor([[[0.5, 0], [9.0, 0], [0.25, 0]]])
    assert Decisions.of(batch, rows).values_D.tolist() == [0.5, 0.25], "nobody valued it, and nobody credits it"
    assert batch.mask_ERA[0, :, 0].all(), "it was said, and its group still counts it"


def test_form_penalties_apply_in_training_only():
    said = turn_of_ids("a", 1, [1], [2])
    said.score = Score(1.0, "1", penalty=0.25)
    record = Episode(Task("t", [], "1", "x", str), 0, ["a"], [said])
    assert joint_batch([record], ["a"], {"a": 1.0}).scores_ERA.item() == 0.75
    assert said.correct, "what is reported knows nothing of it"
