"""Accuracy and names of agents' predictions of their peers' answers. Pure."""

from collections.abc import Sequence

from marl.types import AgentId, Episode, Metrics, Turn


def foresight_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Share of right predictions, of all and by agent and peer: those whose answer is that of the peer's next turn. Turns without
    an answer are not counted."""
    right: dict[tuple[AgentId, AgentId], list[bool]] = {}
    for episode in episodes:
        for note in episode.turns:
            answer = next_answer(episode, note)
            if note.foresees is not None and answer is not None:
                right.setdefault((note.agent, note.foresees), []).append(episode.task.extract(note.text) == answer)
    everyone = [hit for own in right.values() for hit in own]
    metrics = {f"foresight/{agent}/{peer}": sum(own) / len(own) for (agent, peer), own in right.items()}
    return metrics | ({"foresight": sum(everyone) / len(everyone)} if everyone else {})


def speaker(turn: Turn) -> str:
    """The agent, and in a note the peer whose answer it expects."""
    return turn.agent if turn.foresees is None else f"{turn.agent} expects {turn.foresees}"


def next_answer(episode: Episode, note: Turn) -> str | None:
    """The answer in the turn that a note predicts."""
    ahead = (turn for turn in episode.path if turn.agent == note.foresees and turn.round >= note.round)
    turn = next(ahead, None)
    return episode.task.extract(turn.text) if turn is not None and turn.answers else None
