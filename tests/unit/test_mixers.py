"""The mixers against what can be computed by hand: games with one table, and a two-step game."""

import itertools

import pytest
import torch
from torch import nn

from marl.modules.mixers import QMixer, StateEncoder, VDNMixer
from marl.utils.ragged import jagged

JOINT = torch.tensor(list(itertools.product(range(2), repeat=2)))
"""The joint actions of two agents with two actions each."""


def fitted(mixer, payoff, seed=0):
    """Fit a table of utilities [A, 2] and a mixer to a payoff matrix, all joint actions alike; Q_tot as a matrix."""
    torch.manual_seed(seed)
    tables, state, wanted = nn.Parameter(torch.randn(2, 2)), torch.ones(4, 1), torch.tensor(payoff).flatten()
    optimizer = torch.optim.LBFGS(
        [tables, *mixer.parameters()], max_iter=300, line_search_fn="strong_wolfe", history_size=20,
        tolerance_grad=1e-9, tolerance_change=1e-12,
    )  # fmt: skip

    def loss():
        optimizer.zero_grad()
        error = (mixer(tables[torch.arange(2), JOINT], state) - wanted).square().sum()
        error.backward()
        return error

    optimizer.step(loss)
    with torch.no_grad():
        return mixer(tables[torch.arange(2), JOINT], state).view(2, 2)


def best_of(payoff, seeds=range(4)):
    """Best of several first weights: the fit is not convex."""
    fits = []
    for seed in seeds:
        torch.manual_seed(seed)
        fits.append(fitted(QMixer(2, 1, embed_dim=8), payoff, seed))
    return min(fits, key=lambda got: squares(got, payoff))


def squares(got, payoff):
    return float((got - torch.tensor(payoff)).square().sum())


def test_q_tot_rises_with_every_utility_in_any_state():
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        torch.manual_seed(seed)
        mixer = QMixer(num_agents=3, state_dim=4)
        q_BA = 10 * torch.randn(256, 3, generator=generator)
        state_BS = 10 * torch.randn(256, 4, generator=generator)
        (slope_BA,) = torch.autograd.grad(mixer(q_BA.requires_grad_(), state_BS).sum(), q_BA)
        assert (slope_BA >= 0).all() and (slope_BA > 0).any()


def test_the_state_moves_the_weights_and_the_bias():
    torch.manual_seed(0)
    mixer = QMixer(2, 3)
    q_BA, state_BS = torch.ones(2, 2), torch.eye(3)[:2]
    first, second = mixer(q_BA, state_BS)
    idle = mixer(torch.zeros(2, 2), state_BS)
    assert first != second and idle[0] != idle[1]
    assert first - idle[0] != second - idle[1], "not the bias alone"


def test_a_silent_agent_weighs_nothing():
    """A utility of 0 is what an agent has that takes no part: no weight of its own moves Q_tot."""
    torch.manual_seed(0)
    mixer, q_BA, state_BS = QMixer(2, 1), torch.tensor([[0.7, 0.0]]), torch.ones(1, 1)
    before = mixer(q_BA, state_BS)
    with torch.no_grad():
        mixer.weights_in.weight[mixer.embed_dim :] += 5.0
    assert torch.equal(mixer(q_BA, state_BS), before)


def test_vdn_is_a_sum_and_one_agents_is_its_own():
    assert VDNMixer()(torch.tensor([[1.0, 2.0, -4.0]]), torch.zeros(1, 0)).tolist() == [-1.0]
    assert VDNMixer()(torch.tensor([[3.0]]), torch.zeros(1, 0)).tolist() == [3.0]


@pytest.mark.parametrize("payoff", [[[0.0, 1.0], [1.0, 8.0]], [[0.0, 0.0], [0.0, 1.0]]])
def test_qmix_fits_monotone_games_exactly(payoff):
    """The two-step game's second state, and AND."""
    assert squares(best_of(payoff), payoff) < 1e-3


@pytest.mark.slow
def test_qmix_cannot_fit_what_is_not_monotone():
    """XOR: 2/3 is the best monotone fit, where three joint actions get their mean; below it, monotonicity is broken."""
    xor = [[1.0, 0.0], [0.0, 1.0]]
    assert min(squares(fitted(QMixer(2, 1, embed_dim=8), xor, seed), xor) for seed in range(4)) >= 2 / 3 - 1e-4
    best = best_of([[1 / 3, 1 / 3], [1 / 3, 1.0]])
    assert squares(best, xor) == pytest.approx(2 / 3, abs=0.03)


def test_vdns_best_fit_is_the_additive_one():
    got = fitted(VDNMixer(), [[0.0, 1.0], [1.0, 8.0]])
    torch.testing.assert_close(got, torch.tensor([[-1.5, 2.5], [2.5, 6.5]]), atol=1e-3, rtol=0)
    assert squares(got, [[0.0, 1.0], [1.0, 8.0]]) == pytest.approx(9.0, abs=1e-3)


def test_vdn_fits_additive_games_exactly():
    payoff = [[1.0, 3.0], [-2.0, 0.0]]
    assert squares(fitted(VDNMixer(), payoff), payoff) < 1e-5


def two_step_game(make_mixer, steps=400, renewals=2):
    """The game of QMIX's section 6.1, with tables for utilities: agent 1's first action picks the second state, where all
    joint actions pay 7, or [[0, 1], [1, 8]]. Behaviour is uniform, the target greedy. Returns the greedy team's return."""
    torch.manual_seed(0)
    payoffs = torch.tensor([[7.0, 7.0, 7.0, 7.0], [0.0, 1.0, 1.0, 8.0]])
    tables, mixer, agents = nn.Parameter(torch.zeros(3, 2, 2)), make_mixer(), torch.arange(2)
    # states: the first one, and the two second ones; all joint actions in each
    state, joint = torch.arange(3).repeat_interleave(4), JOINT.repeat(3, 1)

    def q_tot(table, mix):
        return mix(table[state[:, None], agents, joint], torch.eye(3)[state]).view(3, 4)

    targets = torch.zeros(3, 4)
    targets[1:] = payoffs
    for _ in range(renewals):
        optimizer = torch.optim.Adam([tables, *mixer.parameters()], lr=0.02)
        with torch.no_grad():
            best = tables.argmax(-1)  # each agent for itself, in every state
            greedy = mixer(tables.gather(-1, best[..., None])[..., 0], torch.eye(3))
        targets[0] = greedy[1:][JOINT[:, 0]]
        for _ in range(steps):
            optimizer.zero_grad()
            (q_tot(tables, mixer) - targets).square().sum().backward()
            optimizer.step()
    best = tables.argmax(-1)
    second = int(best[0, 0])
    return float(payoffs[second, 2 * best[1 + second, 0] + best[1 + second, 1]])


def test_qmix_solves_the_two_step_game_and_vdn_settles_for_7():
    assert two_step_game(VDNMixer) == 7.0
    assert two_step_game(lambda: QMixer(2, 3)) == 8.0


def test_states_tell_texts_apart_by_their_words_and_neighbours():
    torch.manual_seed(0)
    encoder = StateEncoder(state_dim=8, buckets=64)
    ids = jagged([[1, 2, 3], [3, 2, 1], [1, 2, 3], [], [1, 2, 4], []], torch.long)
    states = encoder(ids)
    assert states.shape == (6, 8) and torch.equal(states[0], states[2]) and torch.equal(states[3], states[5])
    assert (states[0] - states[1]).abs().max() > 0.1, "the order counts"
    assert (states[0] - states[4]).abs().max() > 0.1
    alone = encoder(jagged([[3, 2, 1]], torch.long))
    torch.testing.assert_close(alone[0], states[1])  # a row does not read the one before it
    assert encoder(jagged([[]], torch.long)).shape == (1, 8)
