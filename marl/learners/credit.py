"""Credit as pure tensor functions: no config, no state, no cluster.

Turn-level grids carry the axes E episodes, R rounds, A agents; ``mask_ERA`` is 1 where an agent spoke.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from marl.learners.contributions import (
    counterfactual as counterfactual,
    replay_advantages as replay_advantages,
    shapley as shapley,
)
from marl.utils.masks import last_along

ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Tolerance between sums of the same rewards in different order, as a share of the largest of them."""


def team_mean(scores_ERA: Tensor, mask_ERA: Tensor) -> Tensor:
    """Mean score [E, R] over the agents that spoke in a round; 0 where none did."""
    return torch.where(mask_ERA.bool(), scores_ERA, 0.0).sum(-1) / mask_ERA.sum(-1).clamp(min=1)


def at_last_speakers(rewards_ER: Tensor, mask_ERA: Tensor) -> Tensor:
    """Rewards of rounds [E, R, A], each at the last speaker of its round in the agents' order; 0 elsewhere.

    In a chain of agents, a round gives its reward once, at its end.
    """
    mask_ERA = mask_ERA.to(rewards_ER.dtype)
    return rewards_ER[..., None] * last_along(mask_ERA, -1)


def in_last_round(x_E: Tensor, mask_ERA: Tensor) -> Tensor:
    """Numbers of episodes [E, R], each in the last round in which anybody spoke; 0 elsewhere."""
    spoke_ER = mask_ERA.amax(-1).to(x_E.dtype)
    return x_E[:, None] * last_along(spoke_ER, 1)


def last_round(x_ER: Tensor, mask_ERA: Tensor) -> Tensor:
    """The value [E] in the last round in which anybody spoke."""
    rounds_R = torch.arange(1, x_ER.shape[1] + 1)
    last_E = (mask_ERA.amax(-1) * rounds_R).argmax(-1)
    return x_ER.gather(1, last_E[:, None])[:, 0]


def influence(scores_ERA: Tensor, mask_ERA: Tensor, gamma: float) -> Tensor:
    """The influence-aware reward of MAPoRL (arXiv:2502.18439): a turn's own score, and the team's in later rounds.

        R(r, i) = [V(r, i) + sum_{r' > r} gamma^{r' - r} mean_j V(r', j)] / sum_{r' >= r} gamma^{r' - r}

    A round in which nobody spoke (an early consensus) enters neither sum. Zero outside the mask.
    """
    mask_ERA = mask_ERA.to(scores_ERA.dtype)
    later_ER, weight_ER = later_rounds(scores_ERA, mask_ERA, gamma)
    return torch.where(mask_ERA.bool(), (scores_ERA + later_ER[..., None]) / (1 + weight_ER)[..., None], 0.0)


def later_rounds(scores_ERA: Tensor, mask_ERA: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The team's discounted scores of the rounds after each one [E, R], and the sum of their weights [E, R]."""
    mask_ERA = mask_ERA.to(scores_ERA.dtype)
    team_ER, spoke_ER = team_mean(scores_ERA, mask_ERA), mask_ERA.amax(-1)
    later_ER, weight_ER = torch.zeros_like(team_ER), torch.zeros_like(team_ER)
    for r in reversed(range(team_ER.shape[1] - 1)):
        later_ER[:, r] = gamma * (later_ER[:, r + 1] + team_ER[:, r + 1])
        weight_ER[:, r] = gamma * (weight_ER[:, r + 1] + spoke_ER[:, r + 1])
    return later_ER, weight_ER


def incentives(scores_ERA: Tensor, mask_ERA: Tensor, alpha: tuple[float, float], beta: tuple[float, float]) -> Tensor:
    """The incentives of MAPoRL (arXiv:2502.18439), as the paper defines them; its released code differs.

        R(r + 1, i) += alpha_{m(r, i)} (V(r + 1, i) - V(r, i))        R(r, i) += beta_{V(r, i)} (m(r + 1, i) - m(r, i))

    m(r, i) is the score of the majority of i's peers in round r, 0 or 1 (right is above .5). So alpha_0 rewards reaching
    a right answer from wrong peers, alpha_1 being persuaded by right ones; beta_0 rewards a wrong answer that still helps
    the peers, beta_1 persuading them while right. No incentive where the peers are tied, or where they or i itself are silent
    in either round. Rewards [E, R, A].
    """
    spoke_ERA, right_ERA = mask_ERA.bool(), scores_ERA > 0.5
    scores_ERA = torch.where(spoke_ERA, scores_ERA, 0.0)
    sides_ERA = torch.where(right_ERA, 1.0, -1.0) * spoke_ERA
    peers_ERA = sides_ERA.sum(-1, keepdim=True) - sides_ERA
    decided_ERA, majority_ERA = peers_ERA != 0, peers_ERA > 0
    now, later = slice(None, -1), slice(1, None)
    alpha_ERA = torch.where(majority_ERA, alpha[1], alpha[0]) * (decided_ERA & spoke_ERA)
    beta_ERA = torch.where(right_ERA, beta[1], beta[0]) * (decided_ERA & spoke_ERA)
    gained = (scores_ERA[:, later] - scores_ERA[:, now]) * spoke_ERA[:, later]
    turned = (majority_ERA[:, later].float() - majority_ERA[:, now].float()) * decided_ERA[:, later]
    rewards_ERA = torch.zeros_like(scores_ERA)
    rewards_ERA[:, later] += alpha_ERA[:, now] * gained
    rewards_ERA[:, now] += beta_ERA[:, now] * turned
    return rewards_ERA


def returns_to_go(rewards_ERA: Tensor, mask_ERA: Tensor, gamma: float) -> Tensor:
    """An agent's discounted rewards from each of its turns on: G(r, i) = sum_{r' >= r} gamma^{r' - r} R(r', i)."""
    mask_ERA = mask_ERA.bool()
    running_EA = torch.zeros_like(rewards_ERA[:, 0])
    returns_ERA = torch.zeros_like(rewards_ERA)
    for r in reversed(range(rewards_ERA.shape[1])):
        running_EA = torch.where(mask_ERA[:, r], rewards_ERA[:, r], 0.0) + gamma * running_EA
        returns_ERA[:, r] = running_EA
    return torch.where(mask_ERA, returns_ERA, 0.0)


def fold_untrained(rewards_ERA: Tensor, mask_ERA: Tensor, trained_ERA: Tensor, gamma: float | Tensor) -> Tensor:
    """Move rewards of an agent's untrained turns to its last trained turn before them; zero on untrained turns.

    Without it, a learner that trains only round 1 would never see its effect on round 2. ``gamma`` discounts from one
    column to the next, whoever spoke in it; a tensor [R] where columns differ.
    """
    trained_ERA, earned_ERA = trained_ERA.bool(), torch.where(mask_ERA.bool(), rewards_ERA, 0.0)
    gamma_R = torch.as_tensor(gamma, dtype=rewards_ERA.dtype).expand(rewards_ERA.shape[1])
    carried_EA = torch.zeros_like(rewards_ERA[:, 0])
    folded_ERA = torch.zeros_like(rewards_ERA)
    for r in reversed(range(rewards_ERA.shape[1])):
        here_EA = earned_ERA[:, r] + gamma_R[r] * carried_EA
        folded_ERA[:, r] = torch.where(trained_ERA[:, r], here_EA, 0.0)
        carried_EA = torch.where(trained_ERA[:, r], 0.0, here_EA)
    return folded_ERA


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float | Tensor, lam: float) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438) along the last axis; what is masked out is stepped over.

        delta_t = r_t + gamma_t V_{t+1} - V_t        A_t = delta_t + gamma_t lam A_{t+1}

    Rewards, values and mask [N, T]; advantages [N, T], not whitened. With one gamma for all steps it is verl's function of the
    same name, bit for bit; a tensor [N, T] holds the discount from each step to the one that follows it.
    """
    mask = mask.bool()
    gamma_NT = torch.as_tensor(gamma, dtype=torch.float64).expand(values.shape)
    decay_NT, gamma_NT = (gamma_NT * lam).to(values.dtype), gamma_NT.to(values.dtype)
    following = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(following)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma_NT[:, t] * following - values[:, t]
        candidate = delta + decay_NT[:, t] * running
        following = torch.where(mask[:, t], values[:, t], following)
        running = torch.where(mask[:, t], candidate, running)
        advantages[:, t] = running
    return advantages


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Explained variance of the returns: 1 is perfect, 0 no better than their mean, or nothing to explain: returns that differ
    by rounding alone."""
    spread, rounding = returns.var(unbiased=False), 1e-12 * (values.square() + returns.square()).mean()
    return float(1 - (returns - values).var(unbiased=False) / spread) if spread > rounding else 0.0


def group_advantages(
    rewards_B: Tensor,
    keys_B: Sequence[Hashable] | Tensor,
    std: bool,
    eps: float = 1e-6,
    weights_B: Tensor | None = None,
) -> Tensor:
    """Rewards relative to those with the same key (GRPO, arXiv:2402.03300; without std Dr. GRPO, arXiv:2503.20783).

        A = (R - mean) / (std + eps (max - min))      with the sample standard deviation

    GRPO's eps in units of the group's own rewards, so that neither their scale nor their offset matters. Rewards that differ only
    by rounding give exactly 0, where dividing by the deviation would inflate them to advantages of
    order 1; so does a group of one, where verl's GRPO returns the raw reward. ``weights_B`` can count a reward for less than 1.
    """
    index_B, count_G = group_index(keys_B)
    weights_B = torch.ones_like(rewards_B) if weights_B is None else weights_B.to(rewards_B.dtype)
    zeros_G = torch.zeros(len(count_G), dtype=rewards_B.dtype)
    weight_G = zeros_G.index_add(0, index_B, weights_B)
    mean_G = zeros_G.index_add(0, index_B, rewards_B * weights_B) / weight_G
    centred_B = rewards_B - mean_G[index_B]
    low_G, high_G = bounds(rewards_B, index_B, len(count_G))
    equal_B = ~unequal_groups(rewards_B, index_B, len(count_G))[index_B]
    centred_B = centred_B.masked_fill(equal_B, 0.0)  # exactly: a mean of equal numbers may differ in its last bit
    if not std:
        return centred_B
    sum_G = zeros_G.index_add(0, index_B, centred_B.square() * weights_B)
    std_G = (sum_G / (weight_G - 1).clamp(min=1)).sqrt()
    return centred_B / (std_G + eps * (high_G - low_G)).clamp(min=torch.finfo(rewards_B.dtype).tiny)[index_B]


def group_index(keys_B: Sequence[Hashable] | Tensor) -> tuple[Tensor, Tensor]:
    """Number the groups: each entry's group [B], each group's size [G]."""
    keys = keys_B.tolist() if isinstance(keys_B, Tensor) else list(keys_B)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    index_B = torch.tensor([numbers[key] for key in keys], dtype=torch.long)
    return index_B, torch.bincount(index_B, minlength=len(numbers))


def unequal_groups(rewards_B: Tensor, index_B: Tensor, num_groups: int, scale_B: Tensor | None = None) -> Tensor:
    """Mask [G] of groups with two rewards that differ by more than rounding. The others are degenerate: no signal.

    ``scale_B``: the largest number in the sums that the rewards are; where they cancel out, it is larger than the rewards.
    """
    low_G, high_G = bounds(rewards_B, index_B, num_groups)
    scale_G = torch.maximum(low_G.abs(), high_G.abs())
    if scale_B is not None:
        scale_G = torch.maximum(scale_G, bounds(scale_B.to(rewards_B.dtype), index_B, num_groups)[1])
    return high_G - low_G > ROUNDING[rewards_B.dtype] * scale_G


def bounds(x_B: Tensor, index_B: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of each group [G]."""
    low_G = torch.full((num_groups,), torch.inf, dtype=x_B.dtype).scatter_reduce(0, index_B, x_B, "amin")
    return low_G, torch.full((num_groups,), -torch.inf, dtype=x_B.dtype).scatter_reduce(0, index_B, x_B, "amax")
