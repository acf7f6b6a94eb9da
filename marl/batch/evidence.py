"""Evidence for credit schemes out of scored episodes: ballots with scores, and returns with other answers. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from marl.batch.joint import JointBatch
from marl.types import Ballot, Episode, Rule, Turn, Vote


def ballots_of(episode: Episode, no_answer: float = 0.0) -> list[Ballot]:
    """The ballot of the team's decision last, and before it one for every earlier round in which a voter gave an answer that
    had no vote: the voters' last answers so far, by the same rule. None where no rule decided."""
    decided = episode.ballot
    if decided is None:
        return []
    turns = {(turn.agent, turn.round): turn for turn in sorted(episode.turns, key=lambda turn: turn.kept)}
    votes = tuple(replace(vote, score=turns[vote.agent, vote.round].scored.value) for vote in decided.votes)
    decided = replace(decided, votes=votes, no_answer=no_answer)
    weights = {vote.agent: vote.weight for vote in votes}
    voted = {(vote.agent, vote.round) for vote in votes}
    answers = [turn for turn in episode.path if turn.answers and turn.agent in weights]
    rounds = sorted({turn.round for turn in answers if (turn.agent, turn.round) not in voted})
    return [*(earlier(decided, weights, answers, r, episode) for r in rounds), decided]


def earlier(decided: Ballot, weights: dict[str, float], answers: list[Turn], round: int, episode: Episode) -> Ballot:
    """The ballot as it would have stood after this round; where the last vote decides, in the order of turns."""
    standing = {turn.agent: turn for turn in sorted(answers, key=lambda turn: turn.round) if turn.round <= round}
    votes = [
        Vote(
            agent,
            turn.round,
            episode.task.extract(turn.text),
            turn.scored.value if decided.by_score else weight,
            turn.scored.value,
        )
        for agent, weight in weights.items()
        if (turn := standing.get(agent)) is not None
    ]
    if decided.rule is Rule.last:
        votes.sort(key=lambda vote: (vote.round, episode.agents.index(vote.agent)))
    return replace(decided, votes=tuple(votes))


def evidence_grids(
    episodes: Sequence[Episode], cells: Sequence[Sequence[int]], shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The turns' ``evidence`` by name [E, R, A], NaN on turns without it."""
    grids: dict[str, torch.Tensor] = {}
    for episode, own in zip(episodes, cells, strict=True):
        for turn, cell in zip(episode.turns, own, strict=True):
            for name, number in turn.evidence.items() if cell >= 0 else ():
                grids.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64)).view(-1)[cell] = number
    return grids


def outcomes_of(episodes: Sequence[Episode], batch: JointBatch) -> torch.Tensor | None:
    """The turns' ``outcomes`` [E, R, A, K], NaN where there are fewer; None where there are none."""
    placed = [
        (cell, turn.outcomes)
        for episode, own in zip(episodes, batch.cells, strict=True)
        for turn, cell in zip(episode.turns, own, strict=True)
        if cell >= 0 and turn.outcomes
    ]
    if not placed:
        return None
    longest = max(len(returns) for _, returns in placed)
    outcomes_NK = torch.full((batch.spoken_ERA.numel(), longest), torch.nan, dtype=torch.float64)
    for cell, returns in placed:
        outcomes_NK[cell, : len(returns)] = torch.tensor(returns, dtype=torch.float64)
    return outcomes_NK.view(*batch.spoken_ERA.shape, longest)
