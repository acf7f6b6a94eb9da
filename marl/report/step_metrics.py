"""Metrics of a training step, from its episodes and from what policies and critics report. Pure."""

from collections.abc import Iterable, Mapping, Sequence

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
