"""Texts to ids, as parts of a longer text: what a text spells is never a control token, and nothing is added where texts meet.

SentencePiece tokenizers put a space (``▁``) before a text that they encode alone. Within a longer text it belongs at the
beginning only, or after special tokens too: that is asked of the tokenizer itself.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

PARTS = ("pretokenizers", "normalizers")
"""Keys under which ``tokenizer.json`` lists the members of a sequence."""


class TextEncoder:
    """Encodes parts of one text. ``control``: added tokens beside the special ones that a text may not spell."""

    def __init__(self, tokenizer: Any, control: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.added = matches_any(str(token) for token in tokenizer.added_tokens_decoder.values())
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.alone: Tokenizer | None = None
        self.inside: Tokenizer | None = None
        if backend is not None:
            self.alone, self.inside = variants(backend, control)
        self.prefix_after_special = self._prefix_after_special()

    def text(self, text: str, inside: bool) -> list[int]:
        """Ids of a text; ``inside`` where it follows other text."""
        variant = self.inside if inside else self.alone
        if variant is None:  # a tokenizer in Python
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return variant.encode(text, add_special_tokens=False).ids

    def template(self, text: str, inside: bool) -> list[int]:
        """Ids of a text in which special tokens are meant."""
        found = self.added.search(text)
        start = found.start() if found else len(text)
        if not inside or not start:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return [*self.text(text[:start], inside=True), *self.tokenizer.encode(text[start:], add_special_tokens=False)]

    def goes_on(self, before: str, inside: bool) -> bool:
        """True if what follows ``before`` is encoded as inside a text; ``inside`` says so of ``before`` itself."""
        ends = [match.end() for match in self.added.finditer(before)]
        if ends and ends[-1] == len(before):
            return not self.prefix_after_special
        return inside or bool(before)

    def _prefix_after_special(self) -> bool:
        special = next(iter(self.tokenizer.all_special_tokens), None)
        if self.inside is None or special is None:
            return False
        ids = self.tokenizer.encode(f"{special}a", add_special_tokens=False)
        return ids[1:] != self.inside.encode("a", add_special_tokens=False).ids


def matches_any(texts: Any) -> re.Pattern[str]:
    """Matches any of the texts, the longest first."""
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def variants(backend: Tokenizer, control: Collection[str]) -> tuple[Tokenizer, Tokenizer]:
    """Copies that read no control token: one for a text that stands alone, one for a text inside another."""
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["content"] in control
    bare = state | {key: without_prefix(state[key]) for key in ("normalizer", "pre_tokenizer")}
    alone = reader_of_text(state)
    return alone, alone if bare == state else reader_of_text(bare)


def reader_of_text(state: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.encode_special_tokens = True
    return tokenizer


def without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer of ``tokenizer.json`` that puts nothing before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return part | {"add_prefix_space": False}
    lists = {key: [kept for entry in part[key] if (kept := without_prefix(entry))] for key in PARTS if key in part}
    return part | lists
