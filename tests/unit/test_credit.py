"""The numbers of the algorithms, computed by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl.learners import credit

ALL = torch.ones(1, 3, 2, dtype=torch.bool)
VERDICTS = torch.tensor([[[1.0, 0], [0, 1], [1, 1]]])


def test_influence_with_the_papers_gamma():
    expected = torch.tensor([[[0.892086, 0.172662], [0.230769, 1.0], [1.0, 1.0]]])
    torch.testing.assert_close(credit.influence(VERDICTS, ALL, 0.3), expected, atol=1e-6, rtol=0)


def test_influence_with_gamma_one():
    expected = torch.tensor([[[5 / 6, 0.5], [0.5, 1.0], [1.0, 1.0]]])
    torch.testing.assert_close(credit.influence(VERDICTS, ALL, 1.0), expected)


def test_influence_after_an_early_consensus_ends_the_sum():
    mask = ALL.clone()
    mask[:, 2] = False
    expected = torch.tensor([[[0.75, 0.25], [0.0, 1.0], [0.0, 0.0]]])
    torch.testing.assert_close(credit.influence(VERDICTS * mask, mask, 1.0), expected)


def test_influence_averages_over_the_agents_that_spoke():
    mask = ALL.clone()
    mask[0, 1, 0] = False  # in round 2 only the second agent speaks, and is right
    got = credit.influence(VERDICTS * mask, mask, 1.0)
    torch.testing.assert_close(got[0, 0], torch.tensor([1.0, 2 / 3]))
    assert got[0, 1, 0] == 0


def test_influence_skips_a_round_in_which_nobody_spoke():
    mask = ALL.clone()
    mask[:, 1] = False
    got = credit.influence(VERDICTS * mask, mask, 1.0)
    torch.testing.assert_close(got[0, 0], torch.tensor([1.0, 0.5]))


def test_grpo_divides_by_the_sample_deviation():
    got = credit.group_advantages(torch.tensor([1.0, 0, 0, 0]), ["t"] * 4, std=True)
    torch.testing.assert_close(got, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


def test_dr_grpo_does_not_divide():
    got = credit.group_advantages(torch.tensor([1.0, 0, 0, 0]), ["t"] * 4, std=False)
    torch.testing.assert_close(got, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_groups_have_baselines_of_their_own():
    rewards = torch.tensor([1.0, 0, 1, 0, 10, 8, 10, 8])
    got = credit.group_advantages(rewards, ["a"] * 4 + ["b"] * 4, std=True)
    torch.testing.assert_close(got, torch.tensor([1.0, -1, 1, -1] * 2) * 0.8660, atol=1e-4, rtol=0)


def test_a_group_of_one_gives_zero_and_not_the_raw_reward():
    got = credit.group_advantages(torch.tensor([1.0, 5.0, 5.0]), ["alone", "pair", "pair"], std=True)
    assert got.tolist() == [0.0, 0.0, 0.0]


@given(st.floats(-1e3, 1e3, width=32), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward, size):
    assert credit.group_advantages(torch.full((size,), reward), [0] * size, std=True).abs().max() == 0


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(-50, 50))
def test_an_offset_of_a_group_changes_nothing(rewards, offset):
    rewards = torch.tensor(rewards, dtype=torch.float32)
    plain = credit.group_advantages(rewards, [0, 0, 1, 1], std=True)
    shifted = credit.group_advantages(rewards + torch.tensor([0.0, 0, offset, offset]), [0, 0, 1, 1], std=True)
    torch.testing.assert_close(plain, shifted, atol=1e-4, rtol=0)


def test_keys_may_be_a_tensor():
    rewards, keys = torch.tensor([1.0, 0, 3, 1]), torch.tensor([7, 7, 2, 2])
    torch.testing.assert_close(
        credit.group_advantages(rewards, keys, False), credit.group_advantages(rewards, ["x", "x", "y", "y"], False)
    )


def test_returns_to_go_by_hand():
    rewards = torch.tensor([[[1.0, 0], [0, 2], [4, 1]]])
    got = credit.returns_to_go(rewards, ALL, 0.5)
    torch.testing.assert_close(got, torch.tensor([[[2.0, 1.25], [2.0, 2.5], [4.0, 1.0]]]))


def test_returns_to_go_of_a_silent_turn_are_zero_and_do_not_stop_the_sum():
    mask = ALL.clone()
    mask[0, 1, 0] = False
    got = credit.returns_to_go(torch.tensor([[[1.0, 0], [9, 0], [1, 0]]]), mask, 1.0)
    assert got[0, :, 0].tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("last,expected", [(2, 0.3), (1, 0.2), (0, 0.1)])
def test_last_round_is_the_last_in_which_anybody_spoke(last, expected):
    mask = torch.zeros(1, 3, 2)
    mask[0, : last + 1, 0] = 1
    assert credit.last_round(torch.tensor([[0.1, 0.2, 0.3]]), mask).item() == pytest.approx(expected)
