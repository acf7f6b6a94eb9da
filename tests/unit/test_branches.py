"""Conversations that branched: where alternatives stand, what they are compared with, and that nothing else sees them."""

import pytest
import torch

from marl.batch.critic_inputs import CentralTurns, LocalTurns
from marl.learners import CREDITS
from tests.builders import AGENTS, batch_of, branch, build_learner as build, episode, grid_of

TREE = [[1.0, 0.0], [None, 1.0]]
"""a speaks in rounds 1 and 2, b in round 2 alone."""


def test_alternatives_stand_behind_the_rounds():
    batch = batch_of(branch(episode("t", 0, TREE), "a", 1, [0.5, 0.0]), episode("t", 1, TREE))
    assert batch.alternatives.num_rounds == 2 and batch.mask_ERA.shape == (2, 4, 2)
    assert batch.spoken_ERA[0].tolist() == [[True, False], [True, True], [True, False], [True, False]]
    assert batch.scores_ERA[0, :, 0].tolist() == [1.0, 0.0, 0.5, 0.0]
    assert (
        batch.siblings_ERA[0].tolist() == [[0, -1], [-1, -1], [0, -1], [0, -1]] and batch.siblings_ERA[1].eq(-1).all()
    )
    assert batch.mask_ERA[0].tolist() == [[True, False], [True, True], [False, False], [False, False]]
    assert len(batch.rows["a"]) == 4 + 2


def test_untrained_alternatives_are_in_no_grid():
    batch = batch_of(branch(episode("t", 0, TREE), "a", 1, [0.5, 0.0], trained=False))
    assert batch.alternatives is None and batch.mask_ERA.shape == (1, 2, 2)
    assert batch.cells == [[0, 2, 3, -1, -1]] and len(batch.rows["a"]) == 2


@pytest.mark.parametrize("name", ["grpo", "at_grpo"])
def test_truncated_turns_are_compared_but_not_trained(name):
    """1 beside three that were cut off, 0 each: 1.5, though nobody else of the set is trained."""
    record = branch(episode("t", 0, [[1.0], []]), "a", 1, [0.0, 0.0, 0.0])
    for turn in record.turns[1:]:
        turn.trained = False
    batch = batch_of(record)
    build(name).assign_credit(batch)
    assert batch.siblings_ERA[0, :, 0].tolist() == [0, 0, 0, 0] and len(batch.rows["a"]) == 1
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([1.5], abs=1e-4)


def test_each_set_is_compared_within_itself():
    """GRPO: 1, .5, 0 of one set: (1 - .5) / .5 = 1, 0, -1, whatever another sample's set got; rounds without alternatives
    stay in groups of their own."""
    one, two = (
        branch(episode("t", 0, TREE), "a", 1, [0.5, 0.0]),
        branch(episode("t", 1, TREE), "a", 1, [1.0, 1.0], kept_at=2),
    )
    batch = batch_of(one, two, episode("t", 2, [[0.0, 1.0], [None, 0.0]]))
    build("grpo").assign_credit(batch)
    grid = grid_of(batch, "a")
    assert grid[0, [0, 2, 3], 0].tolist() == pytest.approx([1, 0, -1], abs=1e-4)
    assert grid[1, [0, 2, 3], 0].tolist() == [0, 0, 0]
    spread = (1 / 3) ** 0.5  # of 0, 0, 1
    assert grid[:, 1, 0].tolist() == pytest.approx([-1 / 3 / spread, -1 / 3 / spread, 2 / 3 / spread], abs=1e-4)
    assert grid[2, 0, 0] == 0, "a group of one"


def test_a_kept_turn_gets_no_credit_for_later_rounds():
    """Kept: 0, and right in round 2; its alternatives: 1 and .5. What came after is nobody's in the comparison."""
    batch = batch_of(branch(episode("t", 0, [[0.0, 1.0], []]), "a", 1, [1.0, 0.5]))
    build("grpo", std=False).assign_credit(batch)
    assert grid_of(batch, "a")[0, [0, 2, 3], 0].tolist() == [-0.5, 0.5, 0.0]


def test_untrained_turns_give_alternatives_no_credit():
    """Rounds after 1 are not trained: what they earn goes to the path before them, never to a set of alternatives."""
    record = branch(episode("t", 0, [[1.0, 0.5], [0.0, 0.25]]), "a", 1, [0.5, 0.0])
    record = branch(record, "a", 2, [0.75], trained=True)
    batch = batch_of(record, train_rounds=[1])
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    build("ippo", whiten=False).assign_credit(batch)
    assert grid_of(batch, "a")[0, [0, 2, 3], 0].tolist() == [1.0, 0.5, 0.0]
    assert grid_of(batch, "b")[0, 0, 1] == 0.25, "b has no alternatives in round 1"


@pytest.mark.parametrize("name", CREDITS.names())
def test_credit_of_the_path_is_as_if_there_were_no_alternatives(name):
    scheme = CREDITS.get(name)(CREDITS.get(name).Config(name=name))
    plain = batch_of(episode("t", 0, TREE), episode("t", 1, TREE))
    with_them = batch_of(branch(episode("t", 0, TREE), "a", 1, [0.5, 0.0]), episode("t", 1, TREE))
    expected, got = scheme.of(plain), scheme.of(with_them)
    if scheme.kind == "advantage":
        assert torch.equal(got[:, :2], expected)
        return
    alone = with_them.siblings_ERA >= 0
    assert got[alone].tolist() == with_them.scores_ERA[alone].tolist()
    path = ~alone[:, :2]
    assert torch.equal(got[:, :2][path], expected[path])
    assert (got[:, 2:][~alone[:, 2:]] == 0).all()


def test_critics_see_every_alternative_alone():
    """IPPO with lambda 1: an alternative's advantage is its score less its value; nothing chains through it."""
    batch = batch_of(branch(episode("t", 0, [[1.0, 0.25], [None, 1.0]]), "a", 1, [0.5, 0.0]))
    batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.1)
    build("ippo", whiten=False).assign_credit(batch)
    assert grid_of(batch, "a")[0, :, 0].tolist() == pytest.approx([0.9, 0.15, 0.4, -0.1])


class Words:
    """A tokenizer of whole texts, each an id of its own."""

    bos_token_id = None

    def __init__(self):
        self.texts = []

    def encode(self, text, **_):
        self.texts.append(text)
        return [len(self.texts)]


def test_no_critic_reads_alternatives_that_were_not_kept():
    record = branch(episode("t", 0, TREE), "a", 1, [0.5, 0.0])
    batch = batch_of(record)
    words = Words()
    rows = CentralTurns(words).rows([record], batch)["central"]
    assert not any("not kept" in text for text in words.texts)
    assert sorted(rows["turn_index"].values().tolist()) == sorted(cell for cell in batch.cells[0])
    local = LocalTurns().rows([record], batch)
    assert sorted(i for part in local.values() for i in part["turn_index"].values().tolist()) == sorted(batch.cells[0])


def test_zero_sum():
    """The last scores of two sides, 1 and .25: +.75 and -.75 at their last turns; a side alone gets nothing."""
    scheme = CREDITS.get("zero_sum")(CREDITS.get("zero_sum").Config(name="zero_sum"))
    batch = batch_of(episode("t", 0, [[0.5, None, 1.0], [None, 0.25]]), episode("t", 1, [[1.0], []]))
    credit = scheme.assign(batch)
    assert credit[0].tolist() == [[0, 0], [0, -0.75], [0.75, 0]] and (credit[1] == 0).all()
    assert AGENTS == ("a", "b") and scheme.kind == "reward"


def test_alternatives_have_one_value_for_the_state_that_they_share():
    """The central critic reads the task, a, what a said, a and b: each name once a round, however many answers follow."""
    record = branch(episode("t", 0, TREE), "a", 1, [0.5, 0.0])
    batch = batch_of(record)
    rows = CentralTurns(Words()).rows([record], batch)["central"]
    position = dict(zip(rows["turn_index"].values().tolist(), rows["read_at"].values().tolist(), strict=True))
    siblings = batch.siblings_ERA.flatten()
    assert {position[cell] for cell in position if siblings[cell] >= 0} == {1}
    assert sorted(position[cell] for cell in position if siblings[cell] < 0) == [3, 4]
    assert len(rows["input_ids"].values()) == 5
