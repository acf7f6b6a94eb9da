"""Messages and what they say. Pure."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from marl.types import AgentId, Message


class Instructions(NamedTuple):
    """Instructions of an agent, in addition to the task."""

    role: str = ""
    """Text after the question."""
    system: str = ""
    """Text of the system message in front; a system message of the task follows it, in the same message."""

    def beside(self, messages: list[Message]) -> list[Message]:
        """A task's messages with the system prompt before them and the role after the last one."""
        if self.system:
            given = messages[0] if messages[0]["role"] == "system" else None
            text = f"{self.system}\n\n{given['content']}" if given else self.system
            messages = [{"role": "system", "content": text}, *messages[1 if given else 0 :]]
        return followed_by(messages, self.role)


NONE = Instructions()


def instructions_of(agents: Mapping[AgentId, Any]) -> dict[AgentId, Instructions]:
    """The instructions of agents, by their settings."""
    return {name: Instructions(agent.role, agent.system) for name, agent in agents.items()}


def says(text: str, word: str) -> bool:
    """True if a text contains a word, not within another one; the empty word never matches."""
    return bool(word) and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def followed_by(messages: list[Message], text: str) -> list[Message]:
    """Messages with a text after the last one's."""
    if not text:
        return messages
    *earlier, last = messages
    return [*earlier, {**last, "content": f"{last['content']}\n\n{text}"}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}
