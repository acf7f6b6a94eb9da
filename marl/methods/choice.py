"""Choice of a team's episodes to imitate, and of pairs of turns to compare. Pure."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from marl.methods.examples import Example, Side, Speakers
from marl.types import Episode, Score, Turn

Scored = tuple[float, Side]


class CompareBy(Enum):
    """Score by which two turns are compared."""

    own = "own"
    """The turn's."""
    team = "team"
    """The team's answer's."""


RIGHT = "right"


def best_episodes(episodes: Sequence[Episode], min_score: float | str | None, best_of: int | None) -> list[Episode]:
    """The episodes whose team answer scores at least ``min_score``, or is ``RIGHT``, and of these each task's ``best_of`` best, the
    earlier sample first; None for all. Episodes that ended early are left out."""
    tasks: dict[tuple, list[Episode]] = {}
    for episode in whole(episodes):
        if is_good(episode.scored, min_score):
            tasks.setdefault(question(episode), []).append(episode)
    return [
        episode
        for own in tasks.values()
        for episode in sorted(own, key=lambda episode: -episode.scored.value)[:best_of]
    ]


def is_good(score: Score, least: float | str | None) -> bool:
    return score.right if isinstance(least, str) else least is None or score.value >= least


def whole(episodes: Sequence[Episode]) -> Iterator[Episode]:
    """Those that were played to their end."""
    return (episode for episode in episodes if episode.failure is None)


def question(episode: Episode) -> tuple[str, str]:
    """Key of an episode's task: dumps of runs on other data have other questions under the same ids."""
    return episode.task.id, repr(episode.task.messages)


def imitated(episode: Episode, speakers: Speakers) -> Side:
    """The turns of trained agents that the conversation went through, each under the policy that its agent has now; without
    truncated ones, which do not end where the model would have stopped."""
    return [with_policy(turn, speakers) for turn in episode.path if is_usable(turn, speakers)]


def is_usable(turn: Turn, speakers: Speakers) -> bool:
    return turn.agent in speakers and turn.trained and is_whole(turn)


def is_whole(turn: Turn) -> bool:
    """True if the turn ends where its policy ended it. Without ids, as in dumps, it must have an answer."""
    return not turn.truncated and bool(turn.response_ids or turn.text)


def with_policy(turn: Turn, speakers: Speakers) -> Turn:
    """The turn, trained by its agent's present policy; one that was played keeps the policy that played it."""
    if not turn.prompt_ids:
        policies = speakers[turn.agent]
        turn.policy = policies[min(turn.round, len(policies)) - 1]
    return turn


def contrasts(
    episodes: Sequence[Episode], speakers: Speakers, compare_by: CompareBy, same_prompt: bool
) -> tuple[list[Example], int]:
    """Pairs of turns of the same task and place (agent and round) with different scores: the best with the worst, the next best
    with the next worst, while they differ; each turn is in one pair at most. A turn's own score is the one that it would be trained
    with, less the penalty of a long answer. By the team's score, episodes that ended early are left out: the score is not one of
    what they said. Also the number of places without a pair."""
    places: dict[tuple, list[Scored]] = {}
    score: Callable[[Episode, Turn], float] = (
        (lambda episode, turn: turn.scored.value - turn.scored.penalty)
        if compare_by is CompareBy.own
        else (lambda episode, turn: episode.scored.value)
    )
    for episode in episodes if compare_by is CompareBy.own else whole(episodes):
        for turn in imitated(episode, speakers):
            prompt = repr(turn.observation) if same_prompt else ""
            place = (question(episode), turn.agent, turn.round, prompt)
            places.setdefault(place, []).append((score(episode, turn), [turn]))
    pairs: list[Example] = []
    empty = 0
    for scored in places.values():
        found = best_with_worst(scored)
        pairs += found
        empty += not found
    return pairs, empty


def joint_contrasts(
    episodes: Sequence[Episode], speakers: Speakers, same_prompt: bool, most: int | None
) -> tuple[list[Example], int]:
    """Pairs of what the whole team said in two episodes of a task whose answers score differently: each episode in one pair at most,
    or the ``most`` of the widest difference. Also the number of tasks without a pair. Episodes that ended early are left out, and
    a team of which a turn cannot be trained (truncated): its joint probability is not known."""
    tasks: dict[tuple, list[Scored]] = {}
    for episode in whole(episodes):
        parts = [turn for turn in episode.path if turn.agent in speakers and (turn.trained or turn.truncated)]
        if parts and all(is_usable(turn, speakers) for turn in parts):
            side = imitated(episode, speakers)
            prompts = repr([(turn.place, turn.observation) for turn in side]) if same_prompt else ""
            tasks.setdefault((question(episode), prompts), []).append((episode.scored.value, side))
    found = [best_with_worst(own) if most is None else widest(own, most) for own in tasks.values()]
    return [pair for own in found for pair in own], sum(not own for own in found)


def widest(scored: Sequence[Scored], most: int) -> list[Example]:
    """The pairs of the widest difference, a side in several of them; of equal ones the earlier first."""
    pairs = [(one, other) for one in scored for other in scored if contrast(one, other)]
    pairs.sort(key=lambda pair: pair[1][0] - pair[0][0])
    return [Example((better[1], worse[1])) for better, worse in pairs[:most]]


def best_with_worst(scored: Sequence[Scored]) -> list[Example]:
    """Sides with identical texts never form a pair, whatever they scored."""
    order = sorted(scored, key=lambda entry: -entry[0])
    matched = zip(order[: len(order) // 2], reversed(order), strict=False)
    return [Example((better[1], worse[1])) for better, worse in matched if contrast(better, worse)]


def contrast(better: Scored, worse: Scored) -> bool:
    return better[0] > worse[0] and texts(better[1]) != texts(worse[1])


def texts(side: Side) -> list:
    return [(turn.text, turn.observation) for turn in side]
