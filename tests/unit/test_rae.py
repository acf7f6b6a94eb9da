"""RAE: returns relative to the moving mean of their game and role."""

import pytest
import torch

from marl.batch.joint import Alternatives
from marl.utils.ragged import jagged
from tests.builders import batch_of, build_learner as build, episode


def step(learner, *scores, sources=None, **options):
    batch = batch_of(*(episode("t", i, scores) for i, scores in enumerate(scores)), **options)
    batch.sources_E = sources or batch.sources_E
    metrics = learner.assign_credit(batch)
    return {name: rows["advantages"].values().tolist() for name, rows in batch.rows.items()}, metrics


def test_a_constant_reward_of_a_role_ends_in_no_credit():
    """The first player wins by the rules of the game: +1 and -1, however they play."""
    learner = build("rae", "zero_sum")
    for _ in range(30):
        last, metrics = step(learner, *[[[None, 1], [0, None]]] * 2)
    assert max(map(abs, last["a"] + last["b"])) < 1e-6
    assert metrics == {"agent/a/baseline/marl/x": pytest.approx(1), "agent/b/baseline/marl/x": pytest.approx(-1)}


def test_the_mean_moves_by_its_decay():
    """b = (.5 * .5 * 0 + .5 * 1) / (.5 * .5 + .5) after returns 0 and 1 with a decay of one half; two episodes of one step are
    two updates by their mean: (.25 * .5 + .75 * .5) / (.25 * .75 + .75)."""
    learner = build("rae", "own", decay=0.5)
    assert step(learner, [[0], [None]])[0]["a"] == [0.0]
    assert step(learner, [[1], [None]])[0]["a"] == pytest.approx([1 - 2 / 3])
    mean = (0.25 * 0.5 + 0.75 * 0.5) / (0.25 * 0.75 + 0.75)
    assert step(learner, [[1], [None]], [[0], [None]])[0]["a"] == pytest.approx([1 - mean, -mean])


def test_an_episode_updates_a_role_once_however_long_it_is():
    """Two games: one won in a turn, one lost after three. The mean of the outcomes is 0, not that of the turns, -1/2."""
    learner = build("rae", "own")
    got, metrics = step(learner, [[1, None, None], [None]], [[0, 0, -1], [None]])
    assert metrics["agent/a/baseline/marl/x"] == pytest.approx(0.0)
    assert got["a"] == pytest.approx([1.0] + [-1.0] * 6)


def test_the_order_of_a_steps_episodes_does_not_matter():
    one, two = build("rae", "own", decay=0.5), build("rae", "own", decay=0.5)
    scores = [[[1], [0]], [[0], [1]], [[0], [0]]]
    first, second = step(one, *scores)[1], step(two, *reversed(scores))[1]
    assert first == pytest.approx(second)


SWAPPED = [[None, 0], [1, None]], [[1, None], [None, 0]]
"""Games in which b begins, and in which a does: who begins wins."""


def test_a_role_is_who_begins_where_seats_are_swapped():
    """An agent that begins in half of the games wins half of them: its mean would be 0, and every turn a surprise."""
    learner = build("rae", "zero_sum")
    for _ in range(30):
        last, metrics = step(learner, *SWAPPED)
    assert max(map(abs, last["a"] + last["b"])) < 1e-6
    assert metrics == {
        "agent/a/baseline/marl/x/1": pytest.approx(1), "agent/a/baseline/marl/x/2": pytest.approx(-1),
        "agent/b/baseline/marl/x/1": pytest.approx(1), "agent/b/baseline/marl/x/2": pytest.approx(-1),
    }  # fmt: skip


def test_agents_that_begin_together_have_one_role_each_whatever_comes_later():
    learner = build("rae", "own")
    _, metrics = step(learner, [[1, 1], [0, None]], [[1, None], [0, 1]])
    assert sorted(metrics) == ["agent/a/baseline/marl/x", "agent/b/baseline/marl/x"]


def test_roles_and_games_have_means_of_their_own():
    learner = build("rae", "own", decay=0.5)
    step(learner, [[1], [0]], [[0.5], [0.25]], sources=["chess", "go"])
    both, metrics = step(learner, [[1], [0]], [[0.5], [0.25]], sources=["chess", "go"])
    assert both == {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    assert metrics["agent/b/baseline/go"] == 0.25 and len(metrics) == 4


def test_offsets_between_roles_change_nothing_in_the_long_run():
    plain, shifted = build("rae", "own"), build("rae", "own")
    for i in range(5):
        first, _ = step(plain, [[i % 2], [1]], [[0], [i % 3]])
        second, _ = step(shifted, [[i % 2 + 10], [1]], [[10], [i % 3]])
    assert first["a"] == pytest.approx(second["a"], abs=1e-5) and any(first["a"])


def test_it_remembers_over_a_checkpoint(tmp_path):
    learner, again = build("rae", "own"), build("rae", "own")
    step(learner, [[1], [0]])
    torch.save(learner.state_dict(), tmp_path / "learner.pt")
    again.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    assert step(learner, [[0], [1]]) == step(again, [[0], [1]])


def test_kl_penalty_and_later_rounds_count():
    learner, batch = build("rae", "own", gamma=0.5), batch_of(episode("t", 0, [[0, 1], [None, None]]))
    batch.rows["a"]["kl_penalty"] = jagged([[0.25], [0.0, 0.5]], torch.float32)
    learner.assign_credit(batch)
    # round 2: 1 - .5; round 1: 0 - .25 + .5 * .5; the mean .25
    assert batch.rows["a"]["advantages"].values().tolist() == [-0.25, 0.25, 0.25]


def test_a_kept_alternative_stands_for_itself():
    """The reward after it is not its own, as under every learner: 0 in round 1 and 1 in round 2, and not 1 and 1."""
    batch = batch_of(episode("t", 0, [[0, 1], [None, None]]))
    batch.alternatives = Alternatives(torch.where(batch.mask_ERA, torch.tensor([[[0], [1]]]), -1), num_rounds=2)
    build("rae", "own").assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [-0.5, 0.5, 0.5]
