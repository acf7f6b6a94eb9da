"""The final answer of a text, and a text without it. Pure string rules, linear in the length of the text.

Answers that are words or dates are compared as texts: mathematics would take them for products or differences.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator

from marl.rewards.numbers import IN_TEXT, QUANTITY, counted, plain_number, simplified, unwrapped

HASHES = re.compile(r"####[ \t]*([^\s#][^\n#]*)")
STRICT = re.compile(r"#### (-?[0-9.,]+)")
STRICT_TAIL = 300
"""verl looks for the number of a GSM8K answer in that many last characters."""
BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
ANSWER_LINE = re.compile(r"\banswer\s*:\s*([^\s][^\n]*)", re.IGNORECASE)
ONLY_HASHES = re.compile(r"\s*#### ([0-9]+)\s*")

FENCE, PYTHON = "```", "```python"
TAGGED, CLOSED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL), "</answer>"

HIDDEN = "[hidden]"

Extract = Callable[[str], str | None]

DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
SPELT = re.compile(r"[^\W\d_]{3}")
FONTS = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it))\s*\{(.*)\}\s*\.?", re.DOTALL)
FULL_STOPS = ".\u3002\u0964"
"""Latin, Chinese and Devanagari."""
ARTICLE = re.compile(r"(?:the|an?) (?=\S\S)")
SHORT_WORDS = frozenset({"no", "on", "ok", "up"})
"""Other pairs of Latin or Greek letters are products: ``AB`` is ``BA``."""


def only_answer(text: str) -> str | None:
    """The number of a text that is ``#### number`` and nothing else."""
    match = ONLY_HASHES.fullmatch(text)
    return match[1] if match else None


def strict_number(text: str) -> str | None:
    """verl's ``strict`` rule, to the letter: the last ``#### number`` of the last 300 characters, without commas."""
    found = STRICT.findall(text[-STRICT_TAIL:])
    return found[-1].replace(",", "") if found else None


def last_number(text: str) -> str | None:
    """The last number of a text, wherever it stands, given plain; verl's ``flexible`` rule keeps ``18.`` and ``1,000``."""
    found = deque(IN_TEXT.finditer(simplified(text)), maxlen=1)
    return plain_number(found[0]) if found else None


def final_answer(text: str) -> str | None:
    """Text after the last ``####``, else inside the last ``\\boxed{…}``, else None; numbers are in plain form."""
    return plain(after_hashes(text) or last_boxed(text))


def math_answer(text: str) -> str | None:
    """The last ``\\boxed{…}``, else the text after the last ``Answer:``, else after the last ``####``.

    That comes last: in a Markdown text it begins a headline.
    """
    return plain(stated_answer(text))


def stated_answer(text: str) -> str | None:
    """The same as it stands, with its unit."""
    return last_boxed(text) or last_match(ANSWER_LINE, text) or after_hashes(text)


def program(text: str) -> str | None:
    """The program that verl runs: up to the next fence what follows the last that begins Python, or else the whole text."""
    return text.split(PYTHON)[-1].split(FENCE)[0].strip() or None


def tagged_answer(text: str) -> str | None:
    """Content of the last ``<answer>…</answer>``, which verl's search rewards read."""
    found = last_match(TAGGED, closed(text)[0])
    return (found or "").strip() or None


def closed(text: str) -> tuple[str, str]:
    """A text up to its last closing tag, and the rest, in which a search for one would be in vain."""
    end = text.rfind(CLOSED) + 1
    end += len(CLOSED) - 1 if end else 0
    return text[:end], text[end:]


def after_hashes(text: str) -> str | None:
    return last_match(HASHES, text)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """Content of the last closed ``\\boxed{…}``; braces may be nested."""
    _, begin, end = max(boxes(text), key=lambda box: box[1], default=(-1, -1, -1))
    return text[begin:end] if begin >= 0 else None


def boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """Every closed ``\\boxed{…}``: where it stands, where its content begins and ends. One pass, however many stay open."""
    open_braces: list[tuple[int, int] | None] = []
    for brace in BRACES.finditer(text):
        if brace[0].startswith(r"\boxed"):
            open_braces.append(brace.span())
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces:
            box = open_braces.pop()
            if box is not None:
                yield *box, brace.start()


def hide_answer(text: str) -> str:
    """Without every ``#### …``, ``\\boxed{…}`` and ``Answer: …``."""
    kept, end = [], 0
    for start, _, closed in sorted(boxes(text)):
        if start >= end:  # a box within a box goes with it
            kept += [text[end:start], HIDDEN]
            end = closed + 1
    text = "".join([*kept, text[end:]])
    return ANSWER_LINE.sub(f"answer: {HIDDEN}", HASHES.sub(HIDDEN, text))


def hide_programs(text: str) -> str:
    """Without every fenced block; where fences do not pair, or there are none, without anything."""
    parts = text.split(FENCE)
    hidden = "".join(HIDDEN if at % 2 else part for at, part in enumerate(parts))
    return HIDDEN if len(parts) == 1 or (program(text) or "") in hidden else hidden


def hide_tagged(text: str) -> str:
    """Without every ``<answer>…</answer>``."""
    tagged, rest = closed(text)
    return TAGGED.sub(HIDDEN, tagged) + rest


def hide_last_number(text: str) -> str:
    """Without the last number, wherever else in the text it stands."""
    return without_number(text, last_number(text))


def without_number(text: str, answer: str | None) -> str:
    """Without a number, in whichever notation it stands."""
    kept, end = [], 0
    for number in IN_TEXT.finditer(simplified(text)):
        if plain_number(number) == answer:
            kept += [text[end : number.start()], HIDDEN]
            end = number.end()
    return "".join([*kept, text[end:]])


def plain(answer: str | None) -> str | None:
    """An answer without what surrounds it. A number also without currency sign, thousands separators, unit and full stop; words
    without their font and full stop."""
    if answer is None:
        return None
    bare = simplified(answer).strip().strip("*").strip()
    quantity = QUANTITY.fullmatch(unwrapped(bare))
    if quantity is None:
        return words(bare) or bare or None
    return counted(plain_number(quantity), "percent" if quantity["percent"] else quantity["words"] or "")


def agrees(answer: str | None, ground_truth: object) -> bool:
    """True if an answer is the ground truth as it stands in the data, or the same number in plain form."""
    truth = str(ground_truth)
    return answer is not None and answer in (truth, plain(truth))


def words(text: str) -> str | None:
    r"""Words or a date without ``\text{…}`` and the final full stop; None for anything else."""
    bare = text.strip()
    for _ in range(3):  # one in the other
        if found := FONTS.fullmatch(bare):
            bare = found[1].strip()
    bare = bare.rstrip(FULL_STOPS).rstrip()
    return bare if DATE.fullmatch(bare) or (bare and all(map(in_word, bare))) else None


def in_word(sign: str) -> bool:
    return sign.isalpha() or sign in " '\u2019-" or unicodedata.category(sign).startswith("M")


def is_language(text: str) -> bool:
    """True for words or a date, as ``words`` gives them, that are no product of variables."""
    short = not SHORT_WORDS.isdisjoint(text.casefold().split())
    return short or bool(DATE.fullmatch(text) or SPELT.search(text)) or any(map(of_words_alone, text))


def of_words_alone(letter: str) -> bool:
    """True for a letter beyond Latin and Greek, which mathematics does not use."""
    return "\u0400" <= letter <= "\u1cff" or "\u2e80" <= letter <= "\ud7ff"


def folded(text: str) -> str:
    """One spelling of words that differ in case, blanks, apostrophe and an article before them."""
    said = " ".join(unicodedata.normalize("NFC", text).casefold().replace("\u2019", "'").split())
    return ARTICLE.sub("", said)
