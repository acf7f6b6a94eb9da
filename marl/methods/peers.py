"""Prediction of peers' turns: agent modelling as an auxiliary task (Hernandez-Leal et al., arXiv:1907.09597), with the agent's own
words in place of a head. Pure."""

from marl.config.foresight import request
from marl.methods.choice import is_whole, with_policy
from marl.methods.examples import Side, Speakers
from marl.types import AgentId, Episode, Message, Turn

Pair = tuple[AgentId, AgentId]
"""An agent, and the peer whose turns it predicts."""


def predictions(episode: Episode, speakers: Speakers, template: str) -> dict[Pair, Side]:
    """Each peer's next turn after every turn of a trained agent: its first one in the same round or a later one, which the agent
    was not shown. Where the agent predicted it in play, it is asked as it was then. Truncated turns are not predicted."""
    found: dict[Pair, Side] = {}
    for turn in episode.path:
        peers = [agent for agent in episode.agents if agent != turn.agent] if turn.agent in speakers else []
        for peer in peers:
            ahead = next_turn(episode, peer, turn.round)
            if ahead is not None and ahead.text and is_whole(ahead):
                asked = asked_for(episode, turn, peer, template)
                own = Turn(turn.agent, turn.round, asked, ahead.text, foresees=peer)
                found.setdefault((turn.agent, peer), []).append(with_policy(own, speakers))
    return found


def next_turn(episode: Episode, peer: AgentId, round: int) -> Turn | None:
    return next((turn for turn in episode.trajectory(peer) if turn.round >= round), None)


def asked_for(episode: Episode, turn: Turn, peer: AgentId, template: str) -> list[Message]:
    """The question that the agent was asked in play, or that it would have been asked: after what it was shown."""
    place = (turn.agent, turn.round, peer)
    notes = (note for note in episode.turns if (note.agent, note.round, note.foresees) == place)
    asked = next((note.observation for note in notes), None)
    return request(turn.observation, peer, template) if asked is None else asked
