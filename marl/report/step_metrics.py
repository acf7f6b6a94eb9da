"""Metrics of a training step: of its episodes, its rows, and what policies and critics report. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.report import conversation
from marl.types import AgentId, CriticName, Episode, Metrics, PolicyName
from marl.utils.metrics import prefixed


def episode_metrics(episodes: Sequence[Episode], agents: Iterable[AgentId]) -> Metrics:
    """The team's metrics over scored episodes, and each agent's."""
    metrics = prefixed("team", conversation.team_metrics(episodes) | conversation.count_metrics(episodes))
    for agent in agents:
        metrics |= prefixed(f"agent/{agent}", conversation.agent_metrics(episodes, agent))
    return metrics


def count_metrics(started: int, trained: int, refused: int, retried: int) -> Metrics:
    """Number of episodes that are trained, that outgrew an agent's context, that are not trained, and that were rerun."""
    return {
        "team/episodes": float(trained),
        "team/refused_contexts": float(refused),
        "team/failed_episodes": float(started - trained),
        "team/retried_episodes": float(retried),
    }


def policy_metrics(updates: Mapping[PolicyName, Metrics], labels: Mapping[PolicyName, Sequence[str]]) -> Metrics:
    """Each policy's metrics under each of its ``labels``: those of the agents that are trained with it."""
    return {
        f"agent/{label}/{key.removeprefix('actor/')}": value
        for name, numbers in updates.items()
        for label in labels[name]
        for key, value in numbers.items()
    }


def critic_metrics(fits: Mapping[CriticName, Metrics], refused: int) -> Metrics:
    """Each critic's metrics, and how many episodes were too long for one of them."""
    metrics = {f"critic/{name}/{key}": value for name, numbers in fits.items() for key, value in numbers.items()}
    return {"critic/refused_contexts": float(refused)} | metrics


def share_metrics(shares: Mapping[AgentId, float]) -> Metrics:
    return {f"agent/{agent}/credit_share": share for agent, share in shares.items()}


def credit_shares(batch: JointBatch, agents: Sequence[AgentId]) -> dict[AgentId, float]:
    """Share of the total |advantage| that these agents' trained turns got: the mean over a turn's tokens, summed over
    turns. Empty where nobody got any."""
    cells = batch.spoken_ERA.numel()
    size, tokens = torch.zeros(cells, dtype=torch.float64), torch.zeros(cells, dtype=torch.float64)
    for rows in batch.rows.values():
        index_T = rows["turn_index"].values()
        answered_T = index_T >= 0
        own_T = rows["advantages"].values()[answered_T].abs().double()
        size.index_add_(0, index_T[answered_T], own_T)
        tokens.index_add_(0, index_T[answered_T], torch.ones_like(own_T))
    size_A = (size / tokens.clamp(min=1)).view(batch.spoken_ERA.shape).sum((0, 1))
    total = float(sum(size_A[batch.agents.index(agent)] for agent in agents))
    return {agent: float(size_A[batch.agents.index(agent)]) / total for agent in agents} if total > 0 else {}


def token_metrics(
    rows: Mapping[PolicyName, TensorDict],
    outputs: Mapping[PolicyName, TensorDict],
    agents: Sequence[AgentId],
    label: Callable[[AgentId, PolicyName], str],
) -> tuple[dict[PolicyName, float], Metrics]:
    """Each policy's largest gap between the trainer's log-probs (``outputs``) and the servers', and each agent's numbers."""
    gaps: dict[PolicyName, float] = {}
    metrics: Metrics = {}
    for name, computed in outputs.items():
        gaps[name], numbers = policy_tokens(rows[name], computed, [label(agent, name) for agent in agents])
        metrics |= numbers
    return gaps, metrics


def policy_tokens(rows: TensorDict, outputs: TensorDict, labels: Sequence[str]) -> tuple[float, Metrics]:
    """The largest gap between the trainer's log-probs (``outputs``) and the servers', and each agent's numbers, under the
    labels of the team's agents."""
    index, gap = rows["turn_index"].values(), gaps_of(rows, outputs)
    answered = index >= 0
    column, entropy = index[answered] % len(labels), outputs["entropy"].values()[answered]
    metrics: Metrics = {}
    for a, label in enumerate(labels):
        of_agent = column == a
        if of_agent.any():
            numbers = {
                "log_prob_gap_max": gap[of_agent].max(),
                "log_prob_gap_mean": gap[of_agent].mean(),
                "entropy": entropy[of_agent].mean(),
            }
            metrics |= prefixed(f"agent/{label}", {key: float(value) for key, value in numbers.items()})
    return float(gap.max()), metrics


def largest_gap(rows: TensorDict, outputs: TensorDict) -> float:
    """The largest difference between the trainer's log-probs (``outputs``) and the servers' in these rows."""
    return float(gaps_of(rows, outputs).max())


def gaps_of(rows: TensorDict, outputs: TensorDict) -> Tensor:
    """The difference at every generated token, concatenated."""
    gaps_T = (outputs["log_probs"].values() - rows["rollout_log_probs"].values()).abs()
    return gaps_T[rows["turn_index"].values() >= 0]
