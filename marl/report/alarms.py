"""Warnings about a run that cannot learn, or whose numbers cannot be right."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from marl.types import AgentId, Episode, Metrics, PolicyName, Score, Task

logger = logging.getLogger(__name__)

NEARLY_ALL, NO_ENTROPY, MANY_OVERFLOWS = 0.9, 1e-3, 0.1
WINDOW = 20
"""Steps over which an agent's share of the credit is averaged."""


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
    """Warns, once, of rewards on another scale than ``judge.right_at``: nearly every text would count as right, scores of very
    different size would, or none would although scores differ."""

    said = False

    def look(self, episodes: Sequence[Episode], step: int) -> None:
        """Read the scores of a step's or a validation's answers."""
        answers = [turn.scored for episode in episodes for turn in episode.turns if turn.answers]
        scores = [score for score in answers if score.acc is None and not score.failure]
        reason = misplaced(scores, len(answers)) if scores and not self.said else None
        if reason is None:
            return
        self.said = True
        logger.warning(
            "step %d: %s: set judge.right_at to the score of a right text, or let the reward function return acc (true or false) "
            "beside score",
            step, reason,
        )  # fmt: skip


def misplaced(scores: Sequence[Score], total: int) -> str | None:
    """Reason why ``right_at`` does not fit these scores, of ``total`` texts; None if it does."""
    right_at, counted = scores[0].right_at, "in accuracies, votes and reports"
    above = [score.value for score in scores if score.value > right_at]
    if len(above) >= NEARLY_ALL * total:
        return (
            f"{len(above)} of {total} scores are above judge.right_at={right_at:g} (the first is {above[0]:g}), so that nearly every "
            f"text counts as right {counted}"
        )
    if above and max(above) > 2 * abs(min(above)):  # closer ones are a bonus on what is right
        return (
            f"scores from {min(above):g} to {max(above):g} are above judge.right_at={right_at:g}, and all of them count as right "
            f"{counted}"
        )
    values = {score.value for score in scores}
    if len(scores) == total and len(values) > 1 and max(values) < right_at:
        return (
            f"the scores of {total} texts lie between {min(values):g} and {max(values):g}, below judge.right_at={right_at:g}, so that "
            f"none counts as right {counted}"
        )
    return None


class DegenerateGroups:
    """Warns, once per streak, of steps whose groups are all degenerate: nothing is learned from them."""

    def __init__(self, steps: int | None) -> None:
        """``steps``: number of such steps in a row; None for no warning."""
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
                "near 1: set judge.extractors, or let the reward's file export extract(text)); the tasks are too easy or "
                "too hard (team/vote); all samples are the same (agents.<name>.temperature). Warned of after "
                "controller.degenerate_steps=%d",
                self.steps, step, self.steps,
            )  # fmt: skip


class LazyAgents:
    """Warns of an agent, once, whose share stays small: it hardly learns, and may have stopped contributing."""

    def __init__(self, fraction: float | None) -> None:
        """``fraction`` of an equal share, in the mean over the last steps; None for no warning."""
        self.fraction = fraction
        self.recent: deque[Mapping[AgentId, float]] = deque(maxlen=WINDOW)
        self.warned: set[AgentId] = set()

    def look(self, shares: Mapping[AgentId, float], step: int) -> None:
        """A step's shares; one without any tells nothing."""
        if shares:
            self.recent.append(shares)
        if self.fraction is None or len(self.recent) < WINDOW:
            return
        for agent in set(shares) - self.warned:
            mean = sum(past[agent] for past in self.recent) / WINDOW
            if mean < self.fraction / len(shares):
                self.warned.add(agent)
                logger.warning(
                    "agent %r got %.3f of the credit over the last %d steps, to step %d; an equal share is %.3f (warns "
                    "below %g times that: controller.lazy_agent_share). Look at agent/%s/credit_share and what it says",
                    agent, mean, WINDOW, step, 1 / len(shares), self.fraction, agent,
                )  # fmt: skip


class NoAnswers:
    """Warns, once per streak, of steps and validations where more than half of the texts give no answer."""

    def __init__(self, rule_of: Callable[[Task], str]) -> None:
        self.rule_of, self.said = rule_of, False

    def look(self, episodes: Sequence[Episode], step: int) -> None:
        given = [(episode.task, turn) for episode in episodes for turn in episode.turns if turn.answers]
        silent = [(task, turn) for task, turn in given if turn.scored.answer is None]
        if 2 * len(silent) <= len(given):
            self.said = False
        elif not self.said:
            self.said = True
            task, turn = next((one for one in silent if one[1].text.strip()), silent[0])
            text = " ".join(turn.text.split())
            logger.warning(
                "step %d: %d of %d texts give no answer (%d of them were cut off at their limit), so that they have no vote and no "
                "built-in rule scores them. For example: %r. data_source=%s is read by the rule %s; "
                "+judge.extractors={%s: <prose, math, hashes … or file.py:function>} names another one",
                step, len(silent), len(given), sum(one.truncated for _, one in silent),
                text if len(text) <= 160 else f"{text[:80]} … {text[-80:]}",
                task.data_source, self.rule_of(task), task.data_source,
            )  # fmt: skip


class Overflows:
    """Warns, once per streak, of steps and validations in which more than a tenth of the conversations outgrow their context."""

    said = False

    def look(self, episodes: Sequence[Episode], step: int) -> None:
        ended = [episode for episode in episodes if episode.failure == "overflow"]
        many = len(ended) > MANY_OVERFLOWS * len(episodes)
        if many and not self.said:
            logger.warning(
                "step %d: %d of %d conversations outgrew their context and ended early, with judge.failure_score as their "
                "score (team/refused_contexts). The first, of task %s: %s. Fewer rounds, shorter roles or a lower "
                "data.max_response_length also keep them short",
                step, len(ended), len(episodes), ended[0].task.id, ended[0].failure_message,
            )  # fmt: skip
        self.said = many


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
