"""Numbers of an evaluation, from its episodes. Pure.

A failed episode is a wrong one in every number.
"""

import math
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from marl.evaluation.statistics import ks_up_to, majority_at_k, pass_at_k
from marl.report import conversation
from marl.report.conversation import answering_turn, is_right
from marl.types import AgentId, Episode, Turn
from marl.utils import votes
from marl.utils.intervals import wilson


def by_task(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Every task's samples, in the tasks' order."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.task.id, []).append(episode)
    return list(groups.values())


def accuracy_T(episodes: Sequence[Episode]) -> list[float]:
    """Share of each task's samples that the team got right."""
    return [mean([is_right(episode) for episode in samples]) for samples in by_task(episodes)]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def numbers_of(episodes: Sequence[Episode], seconds: float, measures: Sequence[str] = ()) -> dict[str, Any]:
    """All numbers of one team. ``measures``: ``similarity`` and ``perplexity``."""
    right_T, agents = accuracy_T(episodes), episodes[0].agents
    rounds = conversation.rounds_of(episodes)
    result: dict[str, Any] = {
        "accuracy": mean(right_T),
        "interval": wilson(mean(right_T), len(right_T)),
        "failed": len(conversation.failures(episodes)),
        "pass@k": at_k(episodes, pass_of),
        "majority@k": at_k(episodes, majority_of),
        "by_round": {str(r): conversation.round_accuracy(episodes, r) for r in rounds},
        "by_agent": {agent: of_agent(episodes, agent, rounds) for agent in agents},
        "vote_without": {
            agent: accuracy for agent in agents if (accuracy := vote_without(episodes, agent)) is not None
        },
        "cost": cost_of(episodes, seconds),
    }
    extra: dict[str, Callable[[], Any]] = {
        "similarity": lambda: mean([similarity(episode) for episode in episodes]),
        "perplexity": lambda: {agent: perplexity(episodes, agent) for agent in agents},
    }
    return result | {name: extra[name]() for name in measures}


MEASURES = ("similarity", "perplexity")


def at_k(episodes: Sequence[Episode], of: Callable[[Sequence[Episode], int], float]) -> dict[str, float]:
    groups = by_task(episodes)
    return {str(k): mean([of(samples, k) for samples in groups]) for k in ks_up_to(len(groups[0]))}


def pass_of(samples: Sequence[Episode], k: int) -> float:
    return pass_at_k(len(samples), sum(map(is_right, samples)), k)


def majority_of(samples: Sequence[Episode], k: int) -> float:
    """An episode without an answer, a failed one for instance, casts no vote."""
    answers = [episode.answer if episode.failure is None else None for episode in samples]
    return majority_at_k(answers, [is_right(episode) for episode in samples], k)


def of_agent(episodes: Sequence[Episode], agent: AgentId, rounds: Sequence[int]) -> dict[str, Any]:
    by_round = {str(r): conversation.round_accuracy(episodes, r, agent) for r in rounds}
    return {
        "final": conversation.final_accuracy(episodes, agent),
        "by_round": {r: value for r, value in by_round.items() if value is not None},
    }


def vote_without(episodes: Sequence[Episode], agent: AgentId) -> float | None:
    """Accuracy of the same votes, decided without one agent's; None where nobody votes, or nobody else. Ties count by their share."""
    ballots = [episode.ballot for episode in episodes if episode.ballot is not None]
    if not ballots or all(vote.agent == agent for ballot in ballots for vote in ballot.votes):
        return None
    return mean([decided_without(episode, agent) for episode in episodes])


def decided_without(episode: Episode, agent: AgentId) -> float:
    if episode.failure is not None or episode.ballot is None:
        return 0.0
    cast = [vote for vote in episode.ballot.votes if vote.agent != agent]
    best = votes.winners(episode.ballot.rule, [vote.answer for vote in cast], [vote.weight for vote in cast])
    return sum(gives_right(episode, answer) for answer in best) / len(best) if best else 0.0


def gives_right(episode: Episode, answer: str) -> bool:
    """True if a right text of the episode gives this answer."""
    return any(turn.correct and turn.scored.answer == answer for turn in conversation.answers_of(episode))


def similarity(episode: Episode) -> float:
    """Likeness of the team's answer, or of its text where that gives none, and the ground truth: twice the matching characters
    over all (difflib); 0 for a failed episode."""
    if episode.failure is not None or not episode.path:
        return 0.0
    said = answering_turn(episode).text if episode.answer is None else episode.answer
    return SequenceMatcher(None, said, str(episode.task.ground_truth), autojunk=False).ratio()


def perplexity(episodes: Sequence[Episode], agent: AgentId) -> float | None:
    """exp of the mean negative log-prob of an agent's own tokens, as its server gave them; None without any."""
    turns = [turn for episode in episodes for turn in episode.turns if turn.agent == agent]
    log_probs = [p for turn in turns for p, on in zip(turn.log_probs, turn.response_mask, strict=False) if on]
    return math.exp(-mean(log_probs)) if log_probs else None


def cost_of(episodes: Sequence[Episode], seconds: float) -> dict[str, float]:
    turns = [turn for episode in episodes for turn in episode.turns]
    sampled, read = sum(map(num_sampled, turns)), sum(map(num_read, turns))
    return {
        "turns": len(turns),
        "sampled_tokens": sampled,
        "read_tokens": read,
        "sampled_tokens_per_episode": sampled / len(episodes),
        "seconds": round(seconds, 3),
        "sampled_tokens_per_second": round(sampled / seconds, 3) if seconds else 0.0,
    }


def num_sampled(turn: Turn) -> int:
    return sum(turn.response_mask)


def num_read(turn: Turn) -> int:
    """Tokens of the prompt; of an endpoint that only counts, of prompt and answer."""
    return len(turn.prompt_ids) or turn.billed_tokens


def columns_of(turn: Turn) -> dict[str, float | None]:
    """A turn's columns of the dump, from which tokens and perplexity can be computed again."""
    log_probs = [p for p, on in zip(turn.log_probs, turn.response_mask, strict=False) if on]
    return {
        "sampled_tokens": num_sampled(turn),
        "read_tokens": num_read(turn),
        "log_prob": math.fsum(log_probs) if log_probs else None,
    }
