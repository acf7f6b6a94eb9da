"""Scores of episodes: the team's, those of conversations that ended early, and the agents' accuracies in training."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from marl.config.schema import JudgeConfig
from marl.types import AgentId, Episode, Score, Turn


def team_score(episode: Episode, no_answer_score: float = 0.0, failure_score: float = 0.0) -> Score:
    """The runner's own score, else the best score of a turn that gave the team's answer, since only texts are scored.

    The best one: a reward may judge two texts with the same answer differently, and the order of seats decides nothing. The answer
    is right if one of its texts is.
    """
    if episode.failure is not None:
        return Score(failure_score, None, failure=episode.failure)
    if episode.runner_score is not None:
        return episode.runner_score
    if episode.answer is None:
        return Score(no_answer_score, None, acc=0.0)
    gave = [turn for turn in episode.path if turn.answers and episode.task.extract(turn.text) == episode.answer]
    scores = [turn.scored for turn in gave]
    best = max(scores, key=lambda score: score.value, default=Score(0.0, episode.answer, acc=0.0))
    return replace(best, acc=1.0) if any(score.right for score in scores) and not best.right else best


def score_failure(episode: Episode, scores: Mapping[AgentId, float]) -> None:
    """Scores a conversation that ended early, for training: once per agent, at its last turn.

    A turn that is compared with its alternatives keeps its own score, or the best of them would be punished.
    """
    for agent in episode.agents:
        turns = episode.trajectory(agent)
        for turn in turns:
            if turn is turns[-1] and not turn.compared:
                turn.score = turn.scored.for_training(scores[agent])
            elif not turn.answers:
                turn.score = turn.scored.for_training(0.0)


def overlong(length: int, limit: int, buffer: int) -> float:
    """Share of the last ``buffer`` tokens before its limit that an answer uses, 0 to 1 (DAPO, arXiv:2503.14476)."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def priced(score: Score, turn: Turn, settings: JudgeConfig, limit: int) -> Score:
    """A score with what length, truncation and abstention cost. What is right, by ``acc`` or ``right_at``, is an answer.

    ``limit``: on the tokens of an answer, for ``overlong_buffer``.
    """
    score = replace(score, right_at=settings.right_at)
    if settings.overlong_buffer:
        share = overlong(len(turn.response_ids), limit, settings.overlong_buffer)
        score = replace(score, penalty=settings.overlong_penalty * share)
    if turn.truncated and settings.truncated_score is not None:
        return replace(score, value=settings.truncated_score, acc=0.0)
    if score.answer is None and not score.right and settings.no_answer_score is not None:
        return replace(score, value=settings.no_answer_score, acc=0.0)
    return score


class Accuracy:
    """Each agent's share of right answers in training so far; one half before it has given any."""

    def __init__(self) -> None:
        self.right: Counter[AgentId] = Counter()
        self.given: Counter[AgentId] = Counter()

    def update(self, episodes: Sequence[Episode]) -> None:
        for turn in (turn for episode in episodes for turn in episode.turns if turn.answers):
            self.right[turn.agent] += turn.correct
            self.given[turn.agent] += 1

    def shares(self) -> dict[AgentId, float]:
        return {agent: (self.right[agent] + 1) / (given + 2) for agent, given in self.given.items()}

    def state_dict(self) -> dict[str, dict[AgentId, int]]:
        return {"right": dict(self.right), "given": dict(self.given)}

    def load_state_dict(self, state: Mapping[str, Mapping[AgentId, int]]) -> None:
        self.right, self.given = Counter(state["right"]), Counter(state["given"])
