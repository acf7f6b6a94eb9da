"""Effect of a conversation on the answers: accuracy by round, transitions, persuasion, diversity. Pure, over episodes.

All accuracies count alike: those of a round are over the answers given in it, ``final`` over the last answer of each agent
that answered, the vote over the episodes; and a failed episode is wrong. For every answer that it does not hold, and that
others gave there, it counts as one wrong answer; its last answers are wrong, for it did not come to an end.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, pairwise

from marl.report.foresight import foresight_metrics
from marl.types import AgentId, Episode, Metrics, Turn

TRANSITIONS = ("wrong_wrong", "wrong_right", "right_wrong", "right_right")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def is_right(episode: Episode) -> bool:
    """True if the team's answer is right and the episode came to its end, whatever it was paid until then."""
    return episode.failure is None and episode.scored.right


def answers_of(episode: Episode) -> list[Turn]:
    """The turns of the path that are meant to answer the task."""
    return [turn for turn in episode.path if turn.answers]


def team_turns(episode: Episode, trained: Collection[AgentId]) -> list[Turn]:
    """The turns that a single agent would sample instead: without notes, and without untrained agents' turns that are not
    answers, such as a simulated user's."""
    return [turn for turn in episode.turns if turn.branch >= 0 and (turn.answers or turn.agent in trained)]


def turns_in(episodes: Sequence[Episode], round: int, agent: AgentId | None = None) -> list[Turn]:
    """The answers of a round."""
    return [
        turn
        for episode in episodes
        for turn in answers_of(episode)
        if turn.round == round and (agent is None or turn.agent == agent)
    ]


def failures(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if episode.failure is not None]


def num_missing(episodes: Sequence[Episode], counts_E: Sequence[int]) -> int:
    """Number of answers that failed episodes lack, compared with the episode that has most."""
    most = max(counts_E, default=0)
    return sum(most - count for episode, count in zip(episodes, counts_E, strict=True) if episode.failure is not None)


def round_accuracy(episodes: Sequence[Episode], round: int, agent: AgentId | None = None) -> float | None:
    """Share of right answers in a round; None without answers."""
    return share_of_right(episodes, [[turn.correct for turn in turns_in([e], round, agent)] for e in episodes])


def final_accuracy(episodes: Sequence[Episode], agent: AgentId | None = None) -> float | None:
    """Share of agents whose last answer is right, whenever they gave it; None where nobody gave any."""
    last_E = [
        [turns[-1] for name in episode.agents if agent in (None, name) and (turns := answers_by(episode, name))]
        for episode in episodes
    ]
    pairs = zip(episodes, last_E, strict=True)
    return share_of_right(episodes, [[ends_right(episode, turn) for turn in last] for episode, last in pairs])


def share_of_right(episodes: Sequence[Episode], right_E: Sequence[Sequence[bool]]) -> float | None:
    """Share of right answers of all episodes and of those that failed ones lack; None without answers."""
    right = [answer for answers in right_E for answer in answers]
    return sum(right) / (len(right) + num_missing(episodes, list(map(len, right_E)))) if right else None


def ends_right(episode: Episode, last: Turn) -> bool:
    """True if an agent's last answer is right and its episode was played to the end."""
    return last.correct and episode.failure is None


def answers_by(episode: Episode, agent: AgentId) -> list[Turn]:
    return [turn for turn in episode.trajectory(agent) if turn.answers]


def answering_turn(episode: Episode) -> Turn:
    """The last turn whose text gives the team's answer; where none does, or there is no answer, the last one that speaks."""
    speaking = [turn for turn in episode.path if turn.answers] or episode.path
    gave = [
        turn for turn in speaking if episode.answer is not None and episode.task.extract(turn.text) == episode.answer
    ]
    return (gave or speaking)[-1]


def rounds_of(episodes: Sequence[Episode]) -> list[int]:
    """The rounds in which anybody answered."""
    return sorted({turn.round for episode in episodes for turn in answers_of(episode)})


def first_and_last(episodes: Sequence[Episode]) -> Iterator[tuple[Episode, Turn, Turn]]:
    """Every agent's first and last answer of an episode in which it answered more than once."""
    for episode in episodes:
        for agent in episode.agents:
            turns = answers_by(episode, agent)
            if len(turns) > 1:
                yield episode, turns[0], turns[-1]


def transitions(episodes: Sequence[Episode]) -> Metrics:
    """Share of each change of an agent's answer from its first turn to its last; the four sum to 1."""
    names = ("wrong", "right")
    changes = [(first.correct, ends_right(episode, last)) for episode, first, last in first_and_last(episodes)]
    counts = Counter(f"{names[before]}_{names[after]}" for before, after in changes)
    total = sum(counts.values())
    return {name: counts[name] / total for name in TRANSITIONS} if total else {}


def gain(episodes: Sequence[Episode]) -> float:
    """Accuracy of all agents' last answers less that of their first ones: whoever stopped early stands by its answer."""
    answered_E = [[turns for agent in e.agents if (turns := answers_by(e, agent))] for e in episodes]
    gains = [
        float(ends_right(episode, turns[-1])) - float(turns[0].correct)
        for episode, answered in zip(episodes, answered_E, strict=True)
        for turns in answered
    ]
    return sum(gains) / (len(gains) + num_missing(episodes, [len(answered) for answered in answered_E]))


def swayed(episodes: Sequence[Episode]) -> Metrics:
    """Share of initially correct agents that adopted another answer, of those whose peers gave one in the same round."""
    outcomes = []
    for episode, first, last in first_and_last(episodes):
        peers = {
            turn.scored.answer
            for turn in answers_of(episode)
            if turn.agent != first.agent and turn.round == first.round
        }
        peers -= {first.scored.answer, None}
        if first.correct and peers:
            outcomes.append(last.scored.answer in peers)
    return {"swayed": mean(outcomes), "swayed_count": float(len(outcomes))} if outcomes else {}


def diversity(answers: Sequence[str | None]) -> tuple[float, float]:
    """Diversity of a round's answers: entropy in nats, and share of disagreeing pairs. Abstentions are an answer."""
    counts = Counter(answers)
    entropy = -sum(n / len(answers) * math.log(n / len(answers)) for n in counts.values())
    pairs = list(combinations(answers, 2))
    return entropy, mean([a != b for a, b in pairs]) if pairs else 0.0


def plurality_accuracy(episodes: Sequence[Episode], round: int) -> float:
    """Share of episodes whose most frequent answer of this round is right, of those that hold one or failed; ties are broken
    at random, by a fixed seed."""
    rng, right = random.Random(0), []
    for episode in episodes:
        answers = turns_in([episode], round)
        if not answers and episode.failure is None:
            continue
        turns = [turn for turn in answers if turn.scored.answer is not None]
        counts = Counter(str(turn.scored.answer) for turn in turns)
        best = sorted(answer for answer, n in counts.items() if n == max(counts.values()))
        choice = rng.choice(best) if best else None
        right.append(any(turn.correct for turn in turns if turn.scored.answer == choice))
    return mean(right)


def team_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Accuracy and mean score of the team's answer, how many episodes failed, accuracy by round and of the last answers, gain
    of the last answers over the first, and what changed in between."""
    metrics: Metrics = {
        "vote": mean([is_right(episode) for episode in episodes]),
        "score": mean([episode.scored.value for episode in episodes]),
        "failed": float(len(failures(episodes))),
    }
    rounds = rounds_of(episodes)
    for r in rounds:
        metrics |= known({f"accuracy/round_{r}": round_accuracy(episodes, r)})
        metrics[f"plurality/round_{r}"] = plurality_accuracy(episodes, r)
        spread = [
            diversity([turn.scored.answer for turn in turns]) for e in episodes if len(turns := turns_in([e], r)) > 1
        ]
        if spread:
            metrics[f"entropy_of_answers/round_{r}"] = mean([entropy for entropy, _ in spread])
            metrics[f"disagreement/round_{r}"] = mean([disagree for _, disagree in spread])
    metrics |= known({"accuracy/final": final_accuracy(episodes)})
    changes = transitions(episodes)
    if changes:
        metrics["gain"] = gain(episodes)
        metrics |= {f"transitions/{name}": share for name, share in changes.items()}
        metrics |= swayed(episodes)
    return metrics | foresight_metrics(episodes)


def known(metrics: Mapping[str, float | None]) -> Metrics:
    return {name: value for name, value in metrics.items() if value is not None}


def count_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Event counts of runners, as means over episodes."""
    total = sum((episode.counts for episode in episodes), Counter[str]())
    return {name: count / len(episodes) for name, count in total.items()}


def agent_metrics(episodes: Sequence[Episode], agent: AgentId) -> Metrics:
    """One agent's turns an episode, mean score, accuracy by round, response length, the shares of answers that were cut
    off or missing, of prompts that extend the last one and the answer to it in ids, and of conversations that went on where
    ids did not (a template that leaves out earlier thoughts, tools within a turn), so that turns are trained one by one."""
    turns = [turn for episode in episodes for turn in episode.trajectory(agent)]
    if not turns:
        return {}
    metrics = {
        "turns": len(turns) / len(episodes),
        "score": mean([turn.scored.value for turn in turns]),
        "truncated": mean([turn.truncated for turn in turns]),
    }
    lengths = [len(turn.response_ids) for turn in turns if turn.response_ids]
    if lengths:  # an endpoint may give text alone
        metrics["response_length"] = mean(lengths)
    answers = [turn for turn in turns if turn.answers]
    if answers:
        metrics["no_answer"] = mean([turn.scored.answer is None for turn in answers])
    pairs = [pair for e in episodes for pair in pairwise(e.trajectory(agent)) if all(turn.prompt_ids for turn in pair)]
    extended = [turn.extends(last) for last, turn in pairs]
    if extended:
        metrics["extended_prompts"] = mean(extended)
    continued = [turn.extends(last) for last, turn in pairs if turn.goes_on(last)]
    if continued:
        metrics["unpacked_turns"] = 1 - mean(continued)
    by_round = {f"accuracy/round_{r}": round_accuracy(episodes, r, agent) for r in rounds_of(episodes)}
    return metrics | known(by_round | {"accuracy/final": final_accuracy(episodes, agent)})
