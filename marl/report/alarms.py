"""Warnings about a run that cannot learn, or whose numbers cannot be right."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from marl.types import AgentId, Episode, Metrics, PolicyName

logger = logging.getLogger(__name__)

NEARLY_ALL, NO_ENTROPY = 0.9, 1e-3


class Collapse:
    """Warns, once an agent, where its policy has come to repeat itself without end, as after too large a learning rate."""

    def __init__(self, agents: Iterable[AgentId]) -> None:
        self.first = dict.fromkeys(agents, 1.0)
        """The smallest share of truncated answers so far, of agents that have not been warned of."""

    def look(self, metrics: Metrics, step: int) -> None:
        """Read a step's metrics."""
        for agent, before in list(self.first.items()):
            truncated = metrics.get(f"agent/{agent}/truncated", 0.0)
            entropies = [
                x for key, x in metrics.items() if key.startswith(f"agent/{agent}/") and key.endswith("/entropy")
            ]
            self.first[agent] = min(before, truncated)
            if truncated < NEARLY_ALL or before > 1 - NEARLY_ALL or not entropies or max(entropies) > NO_ENTROPY:
                continue
            del self.first[agent]
            logger.warning(
                "agent %r, step %d: the entropy is %.2g nats and %.0f %% of its answers are cut off, %.0f %% before: its policy "
                "repeats itself and has collapsed. Go on from an earlier checkpoint with a lower optim.lr, or look at "
                "agent/*/grad_norm and the rewards",
                agent, step, max(entropies), 100 * truncated, 100 * before,
            )  # fmt: skip


class RightThreshold:
    """Warns, once, of rewards on another scale than ``controller.right_at``: nearly every text would count as right."""

    said = False

    def look(self, episodes: Sequence[Episode], step: int) -> None:
        """Read the scores of a step's or a validation's answers."""
        scores = [turn.scored for episode in episodes for turn in episode.turns if turn.answers]
        above = [score for score in scores if score.acc is None and score.value > score.right_at and not score.failure]
        if self.said or not above or len(above) < NEARLY_ALL * len(scores):
            return
        self.said = True
        logger.warning(
            "step %d: %d of %d scores are above controller.right_at=%g (the first is %g), so that nearly every text counts as right "
            "in accuracies, votes and reports: set controller.right_at to the score of a right text, or let the reward function "
            "return acc (true or false) beside score",
            step, len(above), len(scores), above[0].right_at, above[0].value,
        )  # fmt: skip


class DegenerateGroups:
    """Warns, once per streak, of steps whose groups are all degenerate: nothing is learned from them."""

    def __init__(self, steps: int | None) -> None:
        """After so many steps in a row; None for no warning."""
        self.steps, self.in_a_row = steps, 0

    def look(self, share: float | None, step: int) -> None:
        """Read a step's share of degenerate groups; None where its learner compares no groups."""
        if share is None:
            return
        self.in_a_row = self.in_a_row + 1 if share >= 1.0 else 0
        if self.in_a_row == self.steps:
            logger.warning(
                "all groups of the last %d steps, to step %d, were all alike (team/degenerate_groups=1): their advantages are "
                "0, and nothing is learned. Likely causes: the reward function gives every text the same score (look at "
                "team/score and at the dumps); the credit asks for the team's answer, and no text gives one (agent/*/no_answer "
                "near 1: set controller.extractors, or let the reward's file export extract(text)); the tasks are too easy or "
                "too hard (team/vote); all samples are the same (agents.<name>.temperature). Warned of after "
                "controller.degenerate_steps=%d",
                self.steps, step, self.steps,
            )  # fmt: skip


def warn_of_gaps(gaps: Mapping[PolicyName, float], step: int, alarms: Mapping[PolicyName, float]) -> None:
    """Warn of policies whose log-probs differ by more than ``alarms`` between server and trainer."""
    for policy, gap in gaps.items():
        if gap > alarms[policy]:
            logger.warning(
                "policy %r, step %d: log-probs of server and trainer differ by up to %.2g (alarm at %g): is a weight sync "
                "missing, or does the server run in another precision?",
                policy, step, gap, alarms[policy],
            )  # fmt: skip


def warn_of_passes(gaps: Mapping[PolicyName, float], step: int, bound: float) -> None:
    """Warn of policies whose servers' log-probs are not used, because these gaps are beyond the bound."""
    for policy, gap in gaps.items():
        logger.warning(
            "policy %r, step %d: log-probs of server and trainer differ by up to %.2g on the rows checked, more than "
            "controller.log_prob_gap_bound=%g: the trainer computes old_log_probs until they agree (said once; "
            "policy/%s/log_probs_from_server shows the steps)",
            policy, step, gap, bound, policy,
        )  # fmt: skip
