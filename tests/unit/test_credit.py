"""The numbers of the algorithms, computed by hand."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from marl.learners import credit
from marl.learners.groups import group_means

ALL = torch.ones(1, 3, 2, dtype=torch.bool)
SCORES = torch.tensor([[[1.0, 0], [0, 1], [1, 1]]])


def test_influence_with_the_papers_gamma():
    expected = torch.tensor([[[0.892086, 0.172662], [0.230769, 1.0], [1.0, 1.0]]])
    torch.testing.assert_close(credit.influence(SCORES, ALL, 0.3), expected, atol=1e-6, rtol=0)


def test_influence_with_gamma_one():
    expected = torch.tensor([[[5 / 6, 0.5], [0.5, 1.0], [1.0, 1.0]]])
    torch.testing.assert_close(credit.influence(SCORES, ALL, 1.0), expected)


def test_influence_after_an_early_consensus_ends_the_sum():
    mask = ALL.clone()
    mask[:, 2] = False
    expected = torch.tensor([[[0.75, 0.25], [0.0, 1.0], [0.0, 0.0]]])
    torch.testing.assert_close(credit.influence(SCORES * mask, mask, 1.0), expected)


def test_influence_averages_over_the_agents_that_spoke():
    mask = ALL.clone()
    mask[0, 1, 0] = False  # in round 2 only the second agent speaks, and is right
    got = credit.influence(SCORES * mask, mask, 1.0)
    torch.testing.assert_close(got[0, 0], torch.tensor([1.0, 2 / 3]))
    assert got[0, 1, 0] == 0


def test_influence_skips_a_round_in_which_nobody_spoke():
    mask = ALL.clone()
    mask[:, 1] = False
    got = credit.influence(SCORES * mask, mask, 1.0)
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


@settings(deadline=None)  # a machine may have other work
@given(st.floats(-1e3, 1e3, width=32), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward, size):
    assert credit.group_advantages(torch.full((size,), reward), [0] * size, std=True).abs().max() == 0


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_differ_by_rounding_give_exactly_zero(dtype, scale):
    rewards = torch.tensor([0.7 + 0.1 + 0.2, 1.0, 0.1 + 0.2 + 0.7], dtype=dtype) * scale
    rewards[1] += rewards[1] * torch.finfo(dtype).eps
    assert len(set(rewards.tolist())) > 1
    assert credit.group_advantages(rewards, [0] * 3, std=True).tolist() == [0.0] * 3
    assert not credit.unequal_groups(rewards, torch.zeros(3, dtype=torch.long), 1)


def test_small_differences_are_no_rounding():
    got = credit.group_advantages(torch.tensor([0.0, 1e-4, 0.0, 1e-4]), [0] * 4, std=True)
    assert got.tolist() == pytest.approx([-0.866, 0.866, -0.866, 0.866], abs=1e-4)


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (1e-8, 0.0), (1e6, 0.0), (0.1, 2e5), (-1e-8, 1.0)])
def test_scale_and_offset_of_a_groups_rewards_do_not_matter(scale, offset):
    """1, .5, 0, 0: mean .375, sample deviation sqrt(.6875 / 3) = .478714; eps adds a millionth of the range."""
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64) * scale + offset
    expected = torch.tensor([0.625, 0.125, -0.375, -0.375], dtype=torch.float64) / 0.478714 * (1 if scale > 0 else -1)
    got = credit.group_advantages(rewards, [0] * 4, std=True)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    centred = credit.group_advantages(rewards, [0] * 4, std=False) / abs(scale)
    torch.testing.assert_close(centred, expected * 0.478714, atol=1e-5, rtol=0)


@settings(deadline=None)
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


WRONG, RIGHT = 0.0, 1.0


def incentives_of(me, peers, alpha=(0.0, 0.0), beta=(0.0, 0.0)):
    """Incentives of the first agent, by round; ``me``: its scores by round, ``peers``: each peer's. None is silence."""
    spoken = [me, *peers]
    scores = torch.tensor([[[agent[r] or 0.0 for agent in spoken] for r in range(len(me))]])
    mask = torch.tensor([[[agent[r] is not None for agent in spoken] for r in range(len(me))]])
    return credit.incentives(scores, mask, alpha, beta)[0, :, 0].tolist()


# me now, the peer now, me next -> what round 2 gets of (alpha0, alpha1) = (2, 5)
ALPHA = [
    (WRONG, WRONG, WRONG, 0), (WRONG, WRONG, RIGHT, 2), (WRONG, RIGHT, WRONG, 0), (WRONG, RIGHT, RIGHT, 5),
    (RIGHT, WRONG, WRONG, -2), (RIGHT, WRONG, RIGHT, 0), (RIGHT, RIGHT, WRONG, -5), (RIGHT, RIGHT, RIGHT, 0),
]  # fmt: skip
# me now, the peer now, the peer next -> what round 1 gets of (beta0, beta1) = (2, 5)
BETA = [
    (WRONG, WRONG, WRONG, 0), (WRONG, WRONG, RIGHT, 2), (WRONG, RIGHT, WRONG, -2), (WRONG, RIGHT, RIGHT, 0),
    (RIGHT, WRONG, WRONG, 0), (RIGHT, WRONG, RIGHT, 5), (RIGHT, RIGHT, WRONG, -5), (RIGHT, RIGHT, RIGHT, 0),
]  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("next_of_the_other", [WRONG, RIGHT])
@pytest.mark.parametrize("me,peer,following,expected", ALPHA)
def test_alpha_rewards_an_agents_change_after_seeing_its_peers(me, peer, following, next_of_the_other, expected, sign):
    got = incentives_of([me, following], [[peer, next_of_the_other]], alpha=(2.0 * sign, 5.0 * sign))
    assert got == [0.0, expected * sign], "in round 2, whatever the peer says there"


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("next_of_mine", [WRONG, RIGHT, None])
@pytest.mark.parametrize("me,peer,following,expected", BETA)
def test_beta_rewards_the_peers_change_after_seeing_an_agent(me, peer, following, next_of_mine, expected, sign):
    got = incentives_of([me, next_of_mine], [[peer, following]], beta=(2.0 * sign, 5.0 * sign))
    assert got == [expected * sign, 0.0], "in round 1, the first included, whatever it says next itself"


def test_incentives_depend_on_the_majority_of_the_peers():
    """Two of three peers right, then one: alpha1 in round 2; beta0 in round 1 for turning them to wrong."""
    peers = [[RIGHT, WRONG], [RIGHT, WRONG], [WRONG, RIGHT]]
    assert incentives_of([WRONG, RIGHT], peers, (2.0, 5.0), (3.0, 7.0)) == [-3.0, 5.0]
    assert incentives_of([RIGHT, RIGHT], peers, (2.0, 5.0), (3.0, 7.0)) == [-7.0, 0.0]


def test_a_tie_among_peers_gives_no_incentive():
    tied, right = [[RIGHT, RIGHT], [WRONG, RIGHT]], [[RIGHT, RIGHT], [RIGHT, WRONG]]
    assert incentives_of([WRONG, RIGHT], tied, (2.0, 5.0), (3.0, 7.0)) == [0.0, 0.0], (
        "tied before: neither alpha nor beta"
    )
    assert incentives_of([WRONG, RIGHT], right, (2.0, 5.0), (3.0, 7.0)) == [0.0, 5.0], "tied after: no beta"


def test_silent_agents_get_no_incentive():
    both = {"alpha": (2.0, 5.0), "beta": (3.0, 7.0)}
    assert incentives_of([RIGHT, None], [[RIGHT, RIGHT]], **both) == [0.0, 0.0], "silent in the next round: no alpha"
    assert incentives_of([None, RIGHT], [[WRONG, RIGHT]], **both) == [0.0, 0.0], "silent before: neither"
    assert incentives_of([WRONG, RIGHT], [[None, RIGHT]], **both) == [0.0, 0.0], "no peer before: neither"
    assert incentives_of([WRONG, RIGHT], [[WRONG, None]], **both) == [0.0, 2.0], "no peer after: no beta"
    assert incentives_of([WRONG, RIGHT], [], **both) == [0.0, 0.0], "alone"
    assert incentives_of([WRONG, RIGHT], [[WRONG, None], [None, RIGHT]], **both) == [3.0, 2.0], (
        "another peer speaks for them"
    )


def test_incentives_chain_over_rounds():
    """Wrong, right, wrong beside a peer who is right, right, wrong: alpha1, -alpha1; round 2 persuades to wrong: -beta1."""
    got = incentives_of([WRONG, RIGHT, WRONG], [[RIGHT, RIGHT, WRONG]], (2.0, 5.0), (3.0, 7.0))
    assert got == [0.0, 5.0 - 7.0, -5.0]


def test_scores_above_one_half_count_as_right():
    assert incentives_of([0.25, 0.75], [[0.5, 1.0]], alpha=(2.0, 5.0)) == [0.0, 1.0]
    assert incentives_of([0.25, 0.75], [[0.51, 1.0]], alpha=(2.0, 5.0)) == [0.0, 2.5]


GAME = torch.tensor([[0.0, 2.0], [2.0, -1.0]])


def test_counterfactual_on_the_game_of_happo():
    policies = [torch.tensor([0.7, 0.3])] * 2
    torch.testing.assert_close(credit.counterfactual(GAME, policies, (1, 0)), torch.tensor([1.4, 0.9]))
    torch.testing.assert_close(credit.counterfactual(GAME, policies, (0, 0)), torch.tensor([-0.6, -0.6]))


@settings(deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=12, max_size=12), st.integers(0, 1), st.integers(0, 1))
def test_the_mean_of_counterfactuals_under_the_policy_is_zero(payoffs, first, last):
    q, policies = torch.tensor(payoffs).view(2, 3, 2).float(), ([0.25, 0.75], [0.5, 0.25, 0.25], [1.0, 0.0])
    got = [credit.counterfactual(q, policies, (first, middle, last))[1] for middle in range(3)]
    assert sum(p * advantage for p, advantage in zip(policies[1], got, strict=True)).item() == 0
    assert credit.counterfactual(q, policies, (0, 1, 0))[2] == 0, "a policy that does nothing else"


def test_replay_advantages_leave_one_out():
    assert credit.replay_advantages(torch.tensor([1.0, 0.0])).tolist() == [1.0, -1.0]
    assert credit.replay_advantages(torch.tensor([3.0, 0.0, 1.5])).tolist() == [2.25, -2.25, 0.0]
    assert credit.replay_advantages(torch.tensor([1.0])).tolist() == [0.0], "one alternative"
    shifted = credit.replay_advantages(torch.tensor([3.0, 0.0, 1.5]) + 64)
    assert shifted.tolist() == [2.25, -2.25, 0.0], "what the context adds to all"


def test_untried_alternatives_are_left_out_of_the_mean():
    missing = float("nan")
    got = credit.replay_advantages(torch.tensor([[1.0, 0.0, missing], [5.0, missing, missing], [missing] * 3]))
    assert got.tolist() == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("silent", [(0, 1, 0), (0, 2, 1), (0, 0, 0)])
def test_what_stands_where_nobody_spoke_enters_no_number(silent):
    """Critics and schemes of one's own may leave NaN there: 0 times NaN is NaN."""
    mask, marked = ALL.clone(), SCORES.clone()
    mask[silent], marked[silent] = False, torch.nan
    plain = torch.where(mask, SCORES, 0.0)
    for function in (
        lambda x: credit.team_mean(x, mask),
        lambda x: credit.influence(x, mask, 0.3),
        lambda x: credit.incentives(x, mask, (1.0, 2.0), (3.0, 4.0)),
        lambda x: credit.returns_to_go(x, mask, 0.5),
        lambda x: credit.fold_untrained(x, mask, mask, 0.5),
        lambda x: group_means(x, mask, torch.zeros(mask.shape, dtype=torch.long)),
        lambda x: credit.gae(x[0].T, x[0].T, mask[0].T, 0.9, 0.8)[mask[0].T],
    ):
        assert torch.equal(function(marked), function(plain)) and torch.isfinite(function(marked)).all()


def test_shapley_of_a_veto_player():
    """v = 1 iff 1 and one of 2 and 3 are in."""
    got = credit.shapley(lambda s: float(0 in s and (1 in s or 2 in s)), 3)
    torch.testing.assert_close(got, torch.tensor([2 / 3, 1 / 6, 1 / 6]))


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=16, max_size=16))
def test_shapley_values_sum_to_the_grand_coalitions_gain(values):
    def value(s):
        return float(values[sum(1 << i for i in s)])

    assert credit.shapley(value, 4).sum().item() == pytest.approx(values[15] - values[0], abs=1e-5)


def test_a_dummy_gets_nothing_and_twins_the_same():
    got = credit.shapley(lambda s: 3.0 * (0 in s) * (1 in s) + (2 in s), 4).tolist()
    assert got[3] == 0 and got[0] == got[1] == pytest.approx(1.5) and got[2] == pytest.approx(1.0)


def test_sampled_shapley_values_are_near_the_exact_ones_and_sum_exactly():
    """A majority of nine, where agent 0 has three votes; by the same rule, exact: its share is the chance to be decisive."""

    def value(s):
        return float(len(s) + 2 * (0 in s) >= 6)  # 11 votes

    got = credit.shapley(value, 9)
    # agent 0 turns the vote where 3, 4 or 5 joined before it: 3 of 9 places
    exact = torch.tensor([3 / 9] + [(1 - 3 / 9) / 8] * 8)
    assert got.sum().item() == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(got, exact, atol=0.03, rtol=0)
    assert torch.equal(got, credit.shapley(value, 9)), "the same orders at every call"
    assert credit.shapley(lambda s: float(0 in s), 9).tolist() == [1.0] + [0.0] * 8
