"""A process's usage of a server elsewhere, and its share of what the run may use."""

from collections.abc import Mapping

from marl.types import Metrics

KINDS = ("requests", "retries", "tokens", "seconds")
"""``seconds`` is their sum over the requests."""
Counts = dict[str, float]


class Usage:
    """Counts since they were last taken, and the tokens of the whole run, which :meth:`go_on_from` tells a process.

    Each of ``processes`` may use an equal share of what is left of the budget then.
    """

    def __init__(self, budget: int | None = None, processes: int = 1) -> None:
        self.budget, self.processes = budget, processes
        self.counts: Counts = dict.fromkeys(KINDS, 0.0)
        self.before, self.own = 0, 0
        """Tokens that the run had used when this process was last told, and those of this process since."""

    @property
    def spent(self) -> int:
        """Tokens of the run, as far as this process knows."""
        return self.before + self.own

    @property
    def is_spent(self) -> bool:
        """True if this process has used its share of the budget."""
        if self.budget is None:
            return False
        left = self.budget - self.before
        return left <= 0 or self.own >= max(1, left // self.processes)

    def answered(self, tokens: int) -> None:
        self.counts["tokens"] += tokens
        self.own += tokens

    def asked(self, seconds: float, retries: bool) -> None:
        self.counts["requests"] += 1
        self.counts["retries"] += retries
        self.counts["seconds"] += seconds

    def go_on_from(self, spent: int) -> None:
        """Begin a share anew if the run has used more tokens than this process knew. It may be told twice."""
        if spent > self.before:
            self.before, self.own = spent, 0

    def add(self, counts: Mapping[str, float]) -> None:
        """Count what another process has used."""
        self.counts = {kind: self.counts[kind] + counts[kind] for kind in KINDS}
        self.go_on_from(self.spent + int(counts["tokens"]))

    def take(self) -> Counts:
        """Counts since the last call."""
        taken, self.counts = self.counts, dict.fromkeys(KINDS, 0.0)
        return taken


def usage_metrics(policy: str, counts: Mapping[str, float]) -> Metrics:
    """Sums, and the mean seconds of a request; 0 where there was none."""
    means = {**counts, "seconds": counts["seconds"] / max(1, counts["requests"])}
    return {f"endpoint/{policy}/{kind}": float(means[kind]) for kind in KINDS}
