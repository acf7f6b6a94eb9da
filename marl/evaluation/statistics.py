"""Numbers of an evaluation, from its episodes, and comparisons on the same tasks. Pure.

A failed episode is a wrong one in every number. Tasks are what is drawn: samples of one task are no new tasks.
"""

import math
import random
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import combinations
from typing import Any

import numpy as np

from marl.report import conversation
from marl.report.conversation import answering_turn, is_right
from marl.types import AgentId, Episode, Turn
from marl.utils import votes
from marl.utils.intervals import paired, wilson

MEASURES = ("similarity", "perplexity")
RESAMPLES = 10_000
MOST_SUBSETS = 2_000
"""Subsets of a task's samples whose majorities are averaged; of more, so many are drawn."""
EXACT = 14
"""Differing tasks up to which all signs are tried."""
CHUNK = 1 << 22
"""Numbers drawn at a time."""


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


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k samples is right, of n of which c are: 1 - C(n - c, k) / C(n, k), unbiased (arXiv:2107.03374)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int, seed: int = 0) -> float:
    """Probability that the most frequent of k samples' answers is right: the mean over the subsets of k samples. Ties count by
    their share, abstentions (None) are no vote, and nobody's answer is wrong."""
    good = {answer for answer, ok in zip(answers, right, strict=True) if ok and answer is not None}
    subsets = subsets_of(len(answers), k, seed)
    return math.fsum(majority_is_right([answers[i] for i in subset], good) for subset in subsets) / len(subsets)


def subsets_of(n: int, k: int, seed: int) -> list[tuple[int, ...]]:
    if math.comb(n, k) <= MOST_SUBSETS:
        return list(combinations(range(n), k))
    rng = random.Random(seed)
    return [tuple(rng.sample(range(n), k)) for _ in range(MOST_SUBSETS)]


def majority_is_right(answers: Sequence[str | None], good: set[str]) -> float:
    cast = [answer for answer in answers if answer is not None]
    most = max((cast.count(answer) for answer in set(cast)), default=0)
    best = [answer for answer in set(cast) if cast.count(answer) == most]
    return sum(answer in good for answer in best) / len(best) if best else 0.0


def ks_up_to(n: int) -> list[int]:
    """1, 2, 4, … and n."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def sign_flip_p(differences_T: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test: were the two alike, every task's difference could have had the other
    sign. Exact up to ``EXACT`` differing tasks (for single samples McNemar's exact test), else from random signs."""
    values = np.asarray([value for value in differences_T if value], dtype=float)
    if not len(values):
        return 1.0
    observed = abs(values.sum()) - 1e-12
    if len(values) <= EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
        return float((abs(signs @ values) >= observed).mean())
    rng = np.random.default_rng(seed)
    extreme = sum(
        int((abs(rng.choice((-1.0, 1.0), size=(part, len(values))) @ values) >= observed).sum())
        for part in parts_of(RESAMPLES, max(1, CHUNK // len(values)))
    )
    return (1 + extreme) / (1 + RESAMPLES)


def parts_of(total: int, each: int) -> list[int]:
    return [min(each, total - start) for start in range(0, total, each)]


def compared(a_T: Sequence[float], b_T: Sequence[float]) -> dict[str, Any]:
    """The difference a - b of two means on the same tasks."""
    differences = [a - b for a, b in zip(a_T, b_T, strict=True)]
    return {
        "difference": math.fsum(differences) / len(differences),
        "interval": paired(differences),
        "p": sign_flip_p(differences),
    }
