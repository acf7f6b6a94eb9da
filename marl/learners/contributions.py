"""Counterfactual credit: replaced actions, replaced answers, removed agents. Pure functions."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

EXACT = 6
"""Up to so many agents every order of joining is gone through: 720 of them."""
SAMPLED = 500
"""Above, so many orders are drawn, and each is gone through backwards too."""


def counterfactual(q_joint: Tensor, policies: Sequence[Tensor], joint_action: Sequence[int]) -> Tensor:
    """COMA's advantages [A] (arXiv:1705.08926): an agent's action against its policy, the others' actions fixed.

        A_i = Q(a) - sum_a' pi_i(a') Q(a_-i, a')

    ``q_joint`` has one axis an agent, ``policies`` one vector of probabilities an agent.
    """
    advantages = []
    for agent, policy in enumerate(policies):
        index = [slice(None) if i == agent else int(action) for i, action in enumerate(joint_action)]
        q_alternatives = q_joint[tuple(index)]
        expected = (torch.as_tensor(policy, dtype=q_joint.dtype) * q_alternatives).sum()
        advantages.append(q_alternatives[int(joint_action[agent])] - expected)
    return torch.stack(advantages)


def replay_advantages(returns_K: Tensor) -> Tensor:
    """Each alternative's return less the mean of the others' (C3, arXiv:2603.06859), along the last axis.

        A_k = R_k - mean_{j != k} R_j

    NaN is an alternative that was not tried: it enters no mean, and gets 0. One alternative alone gets 0.
    """
    tried_K = ~returns_K.isnan()
    known_K = returns_K.nan_to_num(0.0)
    others = tried_K.sum(-1, keepdim=True) - 1
    advantages_K = known_K - (known_K.sum(-1, keepdim=True) - known_K) / others.clamp(min=1)
    return torch.where(tried_K & (others > 0), advantages_K, 0.0)


def shapley(value: Callable[[frozenset[int]], float], num_agents: int) -> Tensor:
    """Each agent's mean contribution [A] to a coalition, over the orders in which agents may join it.

        phi_i = mean over orders of v(those before i, and i) - v(those before i)

    They sum to v(all) - v(none). All orders up to 6 agents; above, a thousand that are the same at every call.
    """
    cached_value = cache(value)
    orders = list(permutations(range(num_agents))) if num_agents <= EXACT else drawn_orders(num_agents)
    shares = [0.0] * num_agents
    for order in orders:
        joined: frozenset[int] = frozenset()
        for agent in order:
            before, joined = joined, joined | {agent}
            shares[agent] += cached_value(joined) - cached_value(before)
    return torch.tensor([share / len(orders) for share in shares])


def drawn_orders(num_agents: int) -> list[list[int]]:
    """Orders and their reverses: who joins early in one joins late in the other."""
    rng = random.Random(num_agents)
    orders = [rng.sample(range(num_agents), num_agents) for _ in range(SAMPLED)]
    return [order for drawn in orders for order in (drawn, drawn[::-1])]
