"""Messages, what they say, and conversations that outgrow the context limit. Pure."""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
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


class Overflow(Enum):
    refuse = "refuse"
    """The episode ends there, without an answer: its outcome is ``judge.failure_score``, and its turns are trained."""
    drop_oldest = "drop_oldest"
    """The oldest exchanges after the task are left out, as many as it takes."""
    summarise = "summarise"
    """The agent writes a note of all exchanges but the last, which takes their place; the note is not trained."""


SUMMARISE = (
    "Here is a conversation of yours:\n\n{conversation}\n\nSum up in a few sentences what matters for what comes next."
)
SUMMARY = "What was said before, in short: {summary}"


def drop_oldest(messages: Sequence[Message], head: int) -> list[Message] | None:
    """Without the oldest answer after the first ``head`` messages and what followed it; None where only the last is left."""
    if len(messages) < head + 4:
        return None
    return [*messages[:head], *messages[head + 2 :]]


def to_summarise(messages: Sequence[Message], head: int) -> list[Message]:
    """The request for a note of all exchanges but the last."""
    said = "\n".join(f"{message['role']}: {message['content']}" for message in messages[head:-2])
    return [{"role": "user", "content": SUMMARISE.format(conversation=said)}]


def with_summary(messages: Sequence[Message], head: int, summary: str) -> list[Message]:
    """The first ``head`` messages with the note after them, and the last exchange."""
    *earlier, task = messages[:head]
    noted = {**task, "content": f"{task['content']}\n\n{SUMMARY.format(summary=summary)}"}
    return [*earlier, noted, *messages[-2:]]
