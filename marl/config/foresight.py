"""The question by which an agent predicts what a peer says next, alike in play and in training. Pure."""

from marl.types import AgentId, Message

REQUEST = "What does {agent} say next?"
"""Default of ``runner.foresee_request`` and ``method.peers_request``."""


def request(observation: list[Message], peer: AgentId, template: str) -> list[Message]:
    """An agent's observation, with the question for a peer's next turn after it."""
    *earlier, last = observation
    return [*earlier, {**last, "content": f"{last['content']}\n\n{template.format(agent=peer)}"}]
