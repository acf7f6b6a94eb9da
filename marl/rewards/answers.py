"""Extraction of a text's final answer. Pure string rules, linear in the length of the text."""

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator

from marl.rewards.units import counted, unwrapped
from marl.rewards.words import words

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
MINUS = "-\u2212"  # models write the typographic minus too
HASHES = re.compile(r"####[ \t]*([^\s#][^\n#]*)")
STRICT = re.compile(r"#### (-?[0-9.,]+)")
STRICT_TAIL = 300
"""verl looks for the number of a GSM8K answer in that many last characters."""
# a minus behind a word or a bracket is a difference or a range, not a sign
IN_TEXT = re.compile(rf"(?P<sign>(?<![\w)\]}}])[{MINUS}])?\$?(?P<digits>{DIGITS})")
QUANTITY = re.compile(
    rf"(?:\\?\$)?(?P<sign>[{MINUS}])?(?:\\?\$)?(?P<digits>{DIGITS})\s*(?:\\?%|(?<=\s)(?P<words>[A-Za-z]{{2}}[A-Za-z .]*))?\.?"
)
BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
ANSWER_LINE = re.compile(r"\banswer\s*:\s*([^\s][^\n]*)", re.IGNORECASE)
ONLY_HASHES = re.compile(r"\s*#### ([0-9]+)\s*")

FENCE, PYTHON = "```", "```python"
TAGGED, CLOSED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL), "</answer>"

HIDDEN = "[hidden]"

Extract = Callable[[str], str | None]
PROGRAMS, SEARCH = ("codecontests", "apps", "codeforces", "taco"), "searchR1_"
DATA = {
    "gsm8k": ("openai/gsm8k",),
    "embedded": ("marl/",),
    # verl's own functions: programs, geometry with pictures, search
    "verl": (*PROGRAMS, "hiyouga/geometry3k", SEARCH),
}
"""Kinds of data sources by how their names begin; every other one is mathematics."""


@functools.cache
def kind_of(data_source: str) -> str:
    return next((kind for kind, names in DATA.items() if data_source.startswith(names)), "math")


def extractor(data_source: str, answer_rule: str = "strict") -> Extract:
    """The rule of a data source. ``answer_rule``, strict or flexible, is how a GSM8K answer is read.

    The embedded tasks (``marl/…``) allow nothing around the answer.
    """
    if data_source.startswith((*PROGRAMS, SEARCH)):
        return tagged_answer if data_source.startswith(SEARCH) else program
    gsm8k = {"strict": strict_number, "flexible": last_number}
    rules: dict[str, Extract] = {"embedded": only_answer, "gsm8k": gsm8k[answer_rule], "math": math_answer}
    return rules.get(kind_of(data_source), final_answer)


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
    found = deque(IN_TEXT.finditer(text), maxlen=1)
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


def hider(data_source: str, answer_rule: str = "strict") -> Callable[[str], str]:
    """Function that removes the final answer from a text of a data source."""
    if data_source.startswith((*PROGRAMS, SEARCH)):
        return hide_tagged if data_source.startswith(SEARCH) else hide_programs
    loose = kind_of(data_source) == "gsm8k" and answer_rule == "flexible"
    return hide_last_number if loose else hide_answer


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
    answer = last_number(text)
    return IN_TEXT.sub(lambda number: HIDDEN if plain_number(number) == answer else number[0], text)


def plain(answer: str | None) -> str | None:
    """An answer without what surrounds it. A number also without currency sign, thousands separators, unit and full stop; words
    without their font and full stop."""
    if answer is None:
        return None
    bare = answer.strip().strip("*").strip()
    quantity = QUANTITY.fullmatch(unwrapped(bare))
    if quantity is None:
        return words(bare) or bare or None
    return counted(plain_number(quantity), quantity["words"] or "")


def plain_number(number: re.Match[str]) -> str:
    """``-1,005.50`` as ``-1005.5``: one way to write a number, so that equal numbers are equal strings."""
    whole, _, fraction = number["digits"].replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if number["sign"] and value != "0" else value


def agrees(answer: str | None, ground_truth: object) -> bool:
    """True if an answer is the ground truth as it stands in the data, or the same number in plain form."""
    truth = str(ground_truth)
    return answer is not None and answer in (truth, plain(truth))
