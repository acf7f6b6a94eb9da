"""The nearest known word. Pure, and imports nothing heavy: the command line asks it too."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known word, or nothing where none is near: a wrong guess misleads."""
    words = [word for word in known if len(word) <= LONGEST] if len(name) <= LONGEST else []
    close = words and difflib.get_close_matches(name, words, n=1, cutoff=CLOSE)
    close = close or [word for word in words if begins(word, name)]
    return f" Did you mean {close[0]!r}?" if close else ""


LONGEST = 200
"""Characters of what may be a word: to compare grows with the square of the length, and what is compared may be a stranger's."""
CLOSE = 0.7
"""Two letters exchanged in a word of four give .75."""


def begins(word: str, name: str) -> bool:
    """True if one is the other's first part, as in ``reinforce_plus_plus``."""
    return len(name) > 2 and (word.startswith(f"{name}_") or name.startswith(f"{word}_"))
