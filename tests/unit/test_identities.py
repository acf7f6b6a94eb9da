"""Identities of every learner that promises them; those that define a single one stand in its own test."""

import asyncio

import pytest
import torch

from marl.batch.build import joint_batch
from marl.learners import CREDITS, LEARNERS
from marl.learners.groups import GroupKey
from tests.builders import FakeGroup, batch_of, build_learner as build, episode

GAE = ("ippo", "mappo", "happo")


def credit_of(name):
    return (LEARNERS.get(name).credits or ("own",))[0]


CREDIT_FREE = [name for name in LEARNERS.names() if build(name, credit_of(name)).compares_samples]


def advantages(name, batch, credit=None, **options):
    build(name, credit or credit_of(name), **options).assign_credit(batch)
    return {policy: rows["advantages"].values() for policy, rows in batch.rows.items()}


def scores(count, generator=0):
    return torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(generator)).tolist()


@pytest.mark.parametrize("name", CREDIT_FREE)
def test_equal_samples_give_no_gradient(name):
    batch = batch_of(*(episode("t", i, [[0.3, 0.7], [0.1, 0.9]]) for i in range(4)))
    assert not any(values.any() for values in advantages(name, batch).values())


@pytest.mark.parametrize("name", CREDIT_FREE)
def test_a_group_of_one_gives_0_and_never_the_raw_reward(name):
    batch = batch_of(*(episode(f"t{i}", 0, score) for i, score in enumerate(scores(4))))
    assert not any(values.any() for values in advantages(name, batch).values())


@pytest.mark.parametrize("name", CREDIT_FREE)
def test_advantages_of_a_group_sum_to_0(name):
    batch = batch_of(*(episode("t", i, score) for i, score in enumerate(scores(5))))
    for values in advantages(name, batch).values():
        first, second = values.view(5, 3)[:, 0], values.view(5, 3)[:, 1]
        assert values.any() and abs(first.sum()) < 1e-5 and abs(second.sum()) < 1e-5


@pytest.mark.parametrize("name", CREDIT_FREE)
def test_a_constant_for_a_task_changes_nothing(name):
    """Tasks differ in how hard they are: a group is of one task."""
    plain, shifted = (
        batch_of(*(episode(f"t{i % 2}", i, score) for i, score in enumerate(scores(8)))) for _ in range(2)
    )
    shifted.scores_ERA += torch.tensor([5.0, 0.0] * 4)[:, None, None]
    for got, want in zip(advantages(name, shifted).values(), advantages(name, plain).values(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name,parent", [("magrpo", "grpo"), ("at_grpo", "grpo"), ("mappo", "ippo"), ("happo", "mappo")]
)
def test_one_agent_is_its_single_agent_parent_bit_for_bit(name, parent):
    """One decision an episode; MAGRPO's parent is Dr. GRPO, and what an update gets is compared for HAPPO."""
    batches = [
        batch_of(*(episode(f"t{i // 2}", i, [[score[0][0]], [None]]) for i, score in enumerate(scores(6))))
        for _ in "ab"
    ]
    seen = []
    for which, batch in zip((name, parent), batches, strict=True):
        batch.critic_data.values_ERA = torch.linspace(0, 1, batch.mask_ERA.numel()).view_as(batch.mask_ERA)
        options = {"std": False} if name == "magrpo" else {}
        learner, group = build(which, credit_of(name), **options), FakeGroup()
        learner.assign_credit(batch)
        asyncio.run(learner.update(batch, {"a": group}))
        seen.append(group.rows[0]["advantages"].values())
    assert torch.equal(*seen) and seen[0].any()


def twins(count=6):
    """Episodes of two agents with one policy, and the same turns as episodes of one agent each."""
    shared, alone = [], []
    for i, score in enumerate(scores(count)):
        both = episode(f"t{i // 3}", i, score)
        for turn in both.turns:
            turn.policy = "one"
        shared.append(both)
        for agent in range(2):
            single = episode(f"t{i // 3}", 2 * i + agent, [score[agent], [None, None]])
            for turn in single.turns:
                turn.policy = "one"
            alone.append(single)
    temperatures = {"a": 1.0, "b": 1.0}
    return joint_batch(shared, ("a", "b"), temperatures), joint_batch(alone, ("a", "b"), temperatures)


@pytest.mark.parametrize(
    "name,options",
    [("grpo", {"group_by": [GroupKey.task, GroupKey.round]}), *((name, {}) for name in GAE)],
)
def test_sharing_a_policy_among_twins_is_one_agent_with_their_union_of_rows(name, options):
    batches = twins()
    rows = []
    for batch in batches:
        batch.critic_data.values_ERA = batch.scores_ERA / 2
        learner, group = build(name, "own", **options), FakeGroup()
        learner.assign_credit(batch)
        for part in batch.rows.values():
            part["old_log_probs"] = part["rollout_log_probs"]
        asyncio.run(learner.update(batch, {"one": group}))
        assert len(group.rows) == 1, "one update for both"
        rows.append(sorted(part[0].item() for part in group.rows[0]["advantages"].unbind()))
    assert len(rows[0]) == len(rows[1]) == 24 and any(rows[0])
    assert rows[0] == pytest.approx(rows[1], abs=1e-6)


@pytest.mark.parametrize("credit", [name for name in CREDITS.names() if CREDITS.get(name).kind == "advantage"])
def test_credit_of_kind_advantage_goes_to_the_loss_as_it_is(credit):
    batch = batch_of(*(episode("t", i, score) for i, score in enumerate(scores(3))))
    learner = build("grpo", credit)
    learner.credit.assign = lambda batch: torch.arange(12.0).view(3, 2, 2)
    learner.assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [0, 2, 2, 4, 6, 6, 8, 10, 10]
