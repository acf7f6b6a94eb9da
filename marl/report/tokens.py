"""Token statistics of a step: the gap between servers and trainer, and the agents' entropy. Pure, over rows."""

from collections.abc import Callable, Mapping, Sequence

from tensordict import TensorDict
from torch import Tensor

from marl.types import AgentId, Metrics, PolicyName
from marl.utils.metrics import prefixed


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
        own = column == a
        if own.any():
            numbers = {
                "log_prob_gap_max": gap[own].max(),
                "log_prob_gap_mean": gap[own].mean(),
                "entropy": entropy[own].mean(),
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
