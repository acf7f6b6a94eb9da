"""Answers that are words or dates: they are compared as texts, for mathematics would take them for products or differences."""

import re
import unicodedata

DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
SPELT = re.compile(r"[^\W\d_]{3}")
WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it))\s*\{(.*)\}\s*\.?", re.DOTALL)
FULL_STOPS = ".\u3002\u0964"
"""Latin, Chinese and Devanagari."""
ARTICLE = re.compile(r"(?:the|an?) (?=\S\S)")
SHORT = frozenset({"no", "on", "ok", "up"})
"""Other pairs of Latin or Greek letters are products: ``AB`` is ``BA``."""


def words(text: str) -> str | None:
    r"""Words or a date without ``\text{…}`` and the final full stop; None for anything else."""
    bare = text.strip()
    for _ in range(3):  # one in the other
        if found := WRAPPED.fullmatch(bare):
            bare = found[1].strip()
    bare = bare.rstrip(FULL_STOPS).rstrip()
    return bare if DATE.fullmatch(bare) or (bare and all(map(in_word, bare))) else None


def in_word(sign: str) -> bool:
    return sign.isalpha() or sign in " '\u2019-" or unicodedata.category(sign).startswith("M")


def is_language(text: str) -> bool:
    """True for words or a date, as ``words`` gives them, that are no product of variables."""
    short = not SHORT.isdisjoint(text.casefold().split())
    return short or bool(DATE.fullmatch(text) or SPELT.search(text)) or any(map(of_words_alone, text))


def of_words_alone(letter: str) -> bool:
    """True for a letter beyond Latin and Greek, which mathematics does not use."""
    return "\u0400" <= letter <= "\u1cff" or "\u2e80" <= letter <= "\ud7ff"


def folded(text: str) -> str:
    """One spelling of words that differ in case, blanks, apostrophe and an article before them."""
    said = " ".join(unicodedata.normalize("NFC", text).casefold().replace("\u2019", "'").split())
    return ARTICLE.sub("", said)
