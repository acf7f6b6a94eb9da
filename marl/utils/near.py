"""The nearest known word. Pure, and imports nothing heavy: the command line asks it too."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known word, or nothing where none is near: a wrong guess misleads."""
    words = list(known)
    close = difflib.get_close_matches(name, words, n=1, cutoff=CLOSE) or [word for word in words if begins(word, name)]
    return f" Did you mean {close[0]!r}?" if close else ""


CLOSE = 0.7
"""Two letters exchanged in a word of four give .75."""


def begins(word: str, name: str) -> bool:
    """True if one is the other's first part, as in ``reinforce_plus_plus``."""
    return len(name) > 2 and (word.startswith(f"{name}_") or name.startswith(f"{word}_"))
