"""AT-GRPO: groups by task, agent and round; the numbers of Dr. MAS, which groups by task and agent."""

import pytest
import torch

from marl.learners.groups import GroupKey
from tests.builders import batch_of, build_learner as build, episode


def advantages(batch, learner="at_grpo", credit="own", **options):
    build(learner, credit, **options).assign_credit(batch)
    return {name: rows["advantages"].values().tolist() for name, rows in batch.rows.items()}


def samples(a, b):
    return batch_of(*(episode("t", i, [[x], [y]]) for i, (x, y) in enumerate(zip(a, b, strict=True))))


def test_agents_with_rewards_of_their_own_level_are_compared_with_themselves():
    """a = [1, 0, 1, 0] and b = [10, 8, 10, 8]: .866 with either sign for both; pooled, a never does well."""
    high = 3**0.5 / 2
    got = advantages(samples([1, 0, 1, 0], [10, 8, 10, 8]))
    assert got["a"] == pytest.approx([high, -high] * 2, abs=1e-4)
    assert got["b"] == pytest.approx([high, -high] * 2, abs=1e-4)
    pooled = advantages(samples([1, 0, 1, 0], [10, 8, 10, 8]), group_by=[GroupKey.task])
    assert pooled["a"][:2] == pytest.approx([-0.8114, -1.0278], abs=1e-4)


def test_offsets_of_0_and_10_on_two_rounds_change_nothing():
    plain = batch_of(*(episode("t", i, [[i % 2, 1 - i % 2], [0, i % 2]]) for i in range(4)))
    shifted = batch_of(*(episode("t", i, [[i % 2, 11 - i % 2], [0, 10 + i % 2]]) for i in range(4)))
    for got, want in zip(advantages(shifted, gamma=0.0).values(), advantages(plain, gamma=0.0).values(), strict=True):
        assert got == pytest.approx(want, abs=1e-5) and any(want)


def test_a_group_of_one_gives_0_and_never_the_raw_reward():
    batch = batch_of(episode("t", 0, [[5, 7], [3, None]]))
    assert not any(x for values in advantages(batch).values() for x in values)


def test_credit_is_the_agents_own_and_the_teams():
    batch = samples([1, 0], [1, 1])  # own + mean: a 1 + 1 and 0 + 1/2, b 1 + 1 and 1 + 1/2
    got = advantages(batch, credit="mixed", std=False)
    assert got["a"] == [0.75, -0.75] and got["b"] == [0.25, -0.25]


def test_it_is_grpo_with_another_credit():
    batches = [samples([1, 0, 1, 0], [1, 1, 0, 1]) for _ in range(2)]
    first, second = advantages(batches[0]), advantages(batches[1], learner="grpo")
    assert first == second
    assert torch.tensor(first["a"]).isfinite().all()
