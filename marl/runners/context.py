"""Handling of a conversation that outgrows the context limit. Pure, over messages."""

from collections.abc import Sequence
from enum import Enum

from marl.types import Message


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
