"""Messages and what they say. Pure."""

import re

from marl.types import Message


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
