"""Planning with predictions: before it answers, an agent predicts each peer's next answer and sees its own predictions."""

from collections.abc import Collection

from marl.config.foresight import request
from marl.runners.episode import Agent, LiveEpisode, together
from marl.runners.messages import followed_by
from marl.types import Message


async def foreseen(
    agent: Agent,
    observation: list[Message],
    episode: LiveEpisode,
    speaking: Collection[Agent],
    asked: str,
    shown: str,
    separator: str,
) -> list[Message]:
    """An observation with the agent's predictions of those who still speak after it. Its own policy makes them, in the round of its answer; one whose
    question does not fit its context is left out."""
    round = episode.flow.deepest_round() + 1
    peers = [other.name for other in speaking if other is not agent]
    notes = await together(agent.foresee(peer, request(observation, peer, asked), round) for peer in peers)
    expected = [shown.format(agent=note.foresees, text=note.text) for note in notes if note is not None]
    return followed_by(observation, separator.join(expected))
