"""The answer of a text in plain sentences, as a careful reader takes it. String rules, linear in the length of the text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from marl.rewards.answers import (
    CLOSED,
    DATE,
    HASHES,
    HIDDEN,
    SPELT,
    TAGGED,
    boxes,
    hide_answer,
    is_language,
    plain,
    without_number,
    words,
)
from marl.rewards.numbers import COUNTED, CURRENCY, DIGITS, NUMBER, POWER, QUANTITY, simplified

Span = tuple[int, int]
TAIL, LINE, FAR, MANY = 16_000, 2000, 300, 50
"""Last characters of a text and of a line that are read, characters of a statement, and last marks that are tried."""


class Wanted(Enum):
    """Kind of answer that a question asks for, as its ground truth shows: the number in "Yes, for 9 > 5." is an answer or a reason."""

    number = "number"
    words = "words"
    letter = "letter"


OPTION = re.compile(r"\(?([A-Z])\)?\.?")
FUNCTIONS = frozenset("and or sin cos tan sec csc cot log ln exp sqrt pi mod inf infty min max gcd lcm".split())
SHORT = frozenset(
    (
        "a i is it he she to of in at we so by as be an my on up if do me us am go no the for are was has had his her "
        "its not but you all any per one two out"
    ).split()
)
LATEX = re.compile(r"\\(?:text|mathrm|mathbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
RUN = re.compile(r"[^\W\d_]+")


def wanted_by(truth: Any) -> Wanted:
    text = str(truth if truth is not None else "").strip()
    if OPTION.fullmatch(text):
        return Wanted.letter
    said = words(text)
    name = RUN.match(text)
    named = name is not None and bool(SPELT.match(text)) and name[0].casefold() not in FUNCTIONS and "=" not in text
    return Wanted.words if named or (said and is_language(said) and not DATE.fullmatch(said)) else Wanted.number


LINK = (
    r"(?:[ \t]{0,2}[*_]{1,3})?[ \t]{0,2}"
    r"(?:(?:(?:should|must|would|will|could)[ \t]be|is|are|was|equals|comes[ \t]out[ \t]to|:|=|->|\u2192)(?![A-Za-z])[*_]{0,3}:?\s{0,3})+"
)
ABOUT = r"(?:[ \t](?:to|of|for|in)[ \t][^\n.:=?]{1,80}?|[ \t]?\([^()\n]{1,40}\))?"
STATED = re.compile(
    rf"(?:(?:\b|_)answers?\b[\"']?|\bans\b\.?|(?P<brief>^[ \t>*_#-]{{0,8}}A(?=[*_ ]{{0,4}}:))){ABOUT}{LINK}"
    r"|^[#*_ \t]{0,8}(?:(?:the|my|our|final|correct)[ \t]){0,2}answer[:*_ \t]{0,6}\n\s{0,3}",
    re.IGNORECASE | re.MULTILINE,
)
PEERS = re.compile(
    r"(?:(?<!let)['\u2019]s|\b(?:your|their|his|her|other|(?:says?|claims?|thinks?|believes?)(?:[ ]that)?(?:[ ]the)?))(?:[ ](?:final|correct))?[ ]\Z",
    re.IGNORECASE,
)
"""Words before a peer's answer: "Bob's", "Agent 1 says the"."""
RETRACTED = re.compile(
    r"[.!?\u2026\n][\s\"'*(]*(?:but )?(?:wait|oops)\b|\bi made an? (?:mistake|error)\b", re.IGNORECASE
)
THOUGHT = re.compile(r"</think(?:ing)?>|</thought>")
NAMED = re.compile(
    rf"\b(?:label|relation(?:ship)?|conclusion|verdict|sentiment|category|class(?:ification)?|choice|option|result)\b{LINK}", re.IGNORECASE
)  # fmt: skip
BOX = re.compile(r"\\f?boxed\s?\{")
BARE_BOX = re.compile(r"\\boxed[ \t]?([^\s{}$\\,;]{1,100})")
OPENING = re.compile(
    r"(?:(?:that|about|approximately|roughly|around|just|simply|only|equal to|therefore|thus|indeed)\b|[\u2248~:\"\u201c'`>])*[ \t]*", re.IGNORECASE
)  # fmt: skip
DISPLAY = (
    r"\$\$(?P<dollars>[^$]{1,300})\$\$|\\\[(?P<brackets>(?:[^\\]|\\(?!\])){1,300})\\\]|\\\((?P<parens>(?:[^\\]|\\(?!\))){1,300})\\\)"
    r"|(?<![\\\d$])\$(?P<dollar>[^\s$](?:[^$\n]{0,300}[^\s$\\])?)\$(?!\d)"
)
BOLD = r"\*\*(?P<stars>[^*\n]{1,300})\*\*|__(?P<bars>[^_\n]{1,300})__|`(?P<code>[^`\n]{1,100})`"
DELIMITED = re.compile(f"{DISPLAY}|{BOLD}")
EMPHASIS = re.compile(BOLD)
END = re.compile(
    r"\n|[\"'][ \t]?[,}]|[.!?\u3002](?=[\s\"'*)]|$)|[\u3002;]|,\s{0,2}(?=(?:not|which|because|since|as|so|for|and|he|she|we|they|it|where|with)\b)"
    r"|\s(?=(?:because|since|rather than|instead of)\b)|[ \t](?=\((?![\d\s.,+-]*[,)]))|[ \t][\u2013\u2014-]{1,2}[ \t](?=[A-Za-z])",
    re.IGNORECASE,
)
BUT = re.compile(r"\bbut(?:\s+rather)?\s", re.IGNORECASE)
EQUALS = re.compile(r"(?<![<>!=:])=(?!=)")
SUM = re.compile(r"[\d\s.,()]+(?:(?:[+*/\u00d7\u00f7-]|\\times|\\cdot|\\div)[\d\s.,()]+)+")
LABELLED = (
    r"\b(?:step|agent|round|question|problem|part|equation|method|case|line|figure|table|chapter|page|option|confiden\w{2,3})s?\b[ \t:#]{1,4}\d[\d.]*%?"
    r"|\d{1,9}\s?%[ \t]{1,2}(?:sure|confident|certain)|(?:\b(?:not|cannot be|rather than|instead of|(?:at )?(?:least|most)|(?:less|more|fewer|greater|bigger|smaller) than|half of|twice|minus|negative|(?:between|either)[ ]\$?\d[\d,.]*[ ](?:and|or))"
    r"|n['\u2019]t(?: be)?)[ \t]{1,2}\$?\d[\d,.]*|(?<![A-Za-z/])[<>\u2264\u2265]=?[ ]?\$?\d[\d,.]*"
    r"|\d[\d,.]{0,20}[ ]?(?:times|divided by|plus|minus|[+*\u00d7\u00f7])[ ]?\d[\d,.]*+(?![ ]?(?:=|\^|\*\*))|\d[\d,.]{0,20}[ ](?:squared|cubed)\b"
    r"|(?:(?<!let)['\u2019]s|\b(?:your|their|his|her|other))[ ](?:final )?answer[ ]?(?:is|was|of|:)[ ]?\$?\d[\d,.]*"
    r"|(?<=[^\s(])[ ]\((?=[^()\n]{0,60}[A-Za-z]{2})[^()\n]{1,80}\)|[\w)}]{1,20}[ ]?\^[ ]?\{?-?\d{1,9}\}?"
    r"|(?<=\d )(?:out )?of (?:the |all )?\d[\d,]*|^[ \t]*(?:[-*+>][ \t]+)?\d{1,2}[.)][ \t]+(?=\S)|\d{1,9}(?:st|nd|rd|th)\b|\d{1,9}-[A-Za-z]|(?<!\w)[A-Za-z_]\w{0,40}?\d\w{0,40}"
)
BRACED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
TOKEN = re.compile(
    rf"(?:{LABELLED})|(?P<display>{DISPLAY})|(?P<date>\b[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}\b)|(?P<time>\b[0-9]{{1,2}}:[0-9]{{2}}\b(?:\s?[ap]\.?m\b)?)"
    rf"|(?P<latex>-?[0-9]*\\[dt]?frac{BRACED}{BRACED}|-?[0-9]*\\sqrt(?:\[[0-9]\])?{BRACED})"
    r"|(?P<pair>[\[(]\s?-?[0-9][^()\[\]\n]{0,40},[^()\[\]\n]{1,40}[\])])"
    r"|(?P<comma>(?<![\d,.])\d{1,9}(?:\.\d{3}){0,6},\d{1,2}(?![\d,]|\.\d))"
    rf"|(?P<number>(?:(?<![\w)\]}}])-)?{CURRENCY}(?:-?[0-9]+(?:[ ][0-9]+)?/[0-9]+(?![0-9/])|{NUMBER}))",
    re.MULTILINE | re.IGNORECASE,
)
UNIT = re.compile(r"[ \t]?\\?%|(?:[ \t]|-(?=[A-Za-z]))?([AaPp]\.[Mm]\b\.?|[A-Za-z]+)")
QUOTIENT = re.compile(r"-?([0-9]+)/([0-9]+)")
ASIDE = re.compile(
    r"\n[\W_]{0,8}(?:check|verif\w+|note|explanation|reasoning|confidence|justification)\b[^\n]*", re.IGNORECASE
)
LEADING = re.compile(
    rf"\s*(?:\*\*|\$|\\\()?(?:-?{CURRENCY}(?:[0-9]+/[0-9]+|{DIGITS}){POWER}%?)(?:[ \t][a-z]+)?(?:\*\*|\$|\\\))?"
    r"(?:(?=\.?[ \t]*\n)|(?=[,;]?\s(?:because|since|as|for|due)\b)|(?=[ \t]\()|(?=\.[ \t]+[A-Z]))"
)
CORRECTED = re.compile(
    r"\b(?:wait|actually|correction|mistake|sorry)\b|^[ \t]*\d{1,2}[.)][ \t]", re.IGNORECASE | re.MULTILINE
)
SPOKEN = re.compile(
    r"(?:^|[.!?\n])[\s*_\"']*(?:(?:so|therefore|thus|hence),?\s)?(yes|no|true|false)\b(?=[\s*_\"']*(?:[.,;:!\u2013\u2014\n-]|$))", re.IGNORECASE
)  # fmt: skip
PREDICATE = re.compile(r"(?<=\s)(?:is|are|was|were|be|it['\u2019]s)[ \t]+([^\n]{1,40})\Z", re.IGNORECASE)
LETTER = re.compile(r"\(?([A-Za-z])\)?(?=[).:,*\s]*$|[).:,]|\s+(?:because|since|as)\b)")
CHOSEN = re.compile(
    r"\b(?:option|choice|answer)\s{1,2}\(?([A-Z])\b|\(([A-Z])\)|\b([A-Z])\)?[ ]is[ ](?:right|correct|the answer|my answer)\b"
    r"|(?:\b(?:it['\u2019]s|is|[Ss]o|be|choose|pick|select)[ ]|[:\uff1a][ ]?)\(?([A-Z])\)?(?=[\s.!*)]*\Z)|^[\W_]{0,4}(?P<line>[A-Z])(?:[).:]|[\W_]*$)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Prose:
    """The answer that a text states ("The answer is 14."), boxes, or begins or ends with: the last bold or displayed value, number or
    expression of the last line that has one."""

    wanted: Wanted = Wanted.number

    def __call__(self, text: str) -> str | None:
        found = plain(self.stated(text))
        return found.upper() if found and self.wanted is Wanted.letter and len(found) == 1 else found

    def stated(self, text: str) -> str | None:
        """The same as it stands, with its unit."""
        span = self.span(text)
        return text[slice(*span)] if span else None

    def span(self, text: str) -> Span | None:
        start = max(0, len(text) - TAIL)
        found = find(simplified(text[start:]), self.wanted)
        return (found[0] + start, found[1] + start) if found else None


@dataclass(frozen=True)
class HideProse:
    """A text without the answer that a careful reader takes. A class of its own, so that two are equal in any process."""

    prose: Prose

    def __call__(self, text: str) -> str:
        """Without the answer, wherever it stands; without anything where it stands in yet another form."""
        span = self.prose.span(text)
        if span is None:
            return text
        answer, stated = self.prose(text), text[slice(*span)]
        bounds = rf"(?<!\w){re.escape(stated)}(?!\w)" if len(stated) > 1 or stated.isupper() else r"(?!)"
        kept = re.sub(bounds, HIDDEN, f"{text[: span[0]]}{HIDDEN}{text[span[1] :]}", flags=re.IGNORECASE)
        kept = hide_answer(without_number(kept, answer))
        return HIDDEN if self.prose(kept) == answer else kept


def find(text: str, wanted: Wanted) -> Span | None:
    """Where the answer stands; thoughts, and a box that was cut off, are not read."""
    begin = max((thought.end() for thought in THOUGHT.finditer(text)), default=0)
    end = text.find("<think>", begin)
    closed = sorted(boxes(text))
    known = {start for start, *_ in closed}
    last = closed[-1][0] if closed else -1
    cut = next(
        (box.start() for box in BOX.finditer(text, begin) if box.start() > last and box.start() not in known), -1
    )
    end = min([at for at in (end, cut) if at >= 0], default=len(text))
    return marked(text, begin, end, wanted) or unmarked(text, begin, end, wanted)


def marked(text: str, begin: int, end: int, wanted: Wanted) -> Span | None:
    """The last box, statement or ``####`` that holds an answer."""
    marks: list[tuple[int, str, int, int]] = [(s, "box", b, e) for s, b, e in boxes(text) if begin <= s and e <= end]
    marks += [(box.start(), "box", *box.span(1)) for box in BARE_BOX.finditer(text, begin, end)]
    marks += [
        (said.start(), "said", said.end(), end)
        for said in STATED.finditer(text, begin, end)
        if not (said["brief"] and wanted is Wanted.letter)
        and not PEERS.search(text, max(begin, said.start() - 30), said.start())
    ]
    tagged = max(text.rfind(CLOSED, begin, end), begin)
    marks += [(found.start(), "box", *found.span(1)) for found in TAGGED.finditer(text, begin, tagged + len(CLOSED))]
    if wanted is not Wanted.number:
        marks += [(said.start(), "said", said.end(), end) for said in NAMED.finditer(text, begin, end)]
    last = len(text[:end].rstrip())
    for found in HASHES.finditer(text, begin, end):
        if found.end() >= last or QUANTITY.fullmatch(found[1].strip()):
            marks.append((found.start(), "hashes", *found.span(1)))
    for _, kind, at, until in sorted(marks)[: -MANY - 1 : -1]:
        span = statement(text, at, until, wanted) if kind == "said" else value(text, at, until, wanted, whole=True)
        if span:
            taken_back = RETRACTED.search(text, span[1], end)
            return (taken_back and last_value(text, taken_back.end(), end)) or span
    return None


def statement(text: str, at: int, until: int, wanted: Wanted) -> Span | None:
    """Span of the answer in a sentence, after "the answer is"."""
    until = min(until, at + FAR)
    at = OPENING.match(text, at, until).end()  # type: ignore[union-attr]
    inner = DELIMITED.match(text, at, until)
    if inner:
        return value(text, *inner.span(inner.lastgroup or 0), wanted)
    ended = END.search(text, at, until)
    end = ended.start() if ended else until
    if re.compile(r"not\b", re.IGNORECASE).match(text, at, end):
        other = BUT.search(text, at, end)
        if other is None:
            return None
        at = other.end()
    return value(text, at, end, wanted)


def trimmed(text: str, begin: int, end: int, signs: str = " \t\n*_`\"'\u201c\u201d") -> Span:
    while begin < end and text[begin] in signs:
        begin += 1
    while begin < end and text[end - 1] in f"{signs}.,;:!\u3002":
        end -= 1
    return begin, end


def value(text: str, begin: int, end: int, wanted: Wanted, whole: bool = False) -> Span | None:
    """The answer within a statement; ``whole``: a box or the like, whose content is the answer as it stands."""
    begin, end = trimmed(text, begin, end)
    said = text[begin:end]
    if not said or HIDDEN in said:
        return None
    if wanted is Wanted.letter and (letter := LETTER.match(text, begin, end) or CHOSEN.search(text, begin, end)):
        return letter.span(letter.lastindex or 0)
    if wanted is Wanted.words or whole:
        return (begin, end) if whole or len(said.split()) <= 8 else None
    equals = list(EQUALS.finditer(said))
    if equals and not (len(equals) > 1 and re.search("[,;]", said)):
        begin, end = trimmed(text, begin + equals[-1].end(), end)
    if is_mathematics(text[begin:end]):
        return begin, end
    tokens = list(tokens_of(text, begin, end))
    if tokens:
        return tokens[0] if tokens[0][0] == begin or equals else tokens[-1]
    return (begin, end) if 0 < len(said.split()) <= 4 and not equals else None


def is_mathematics(text: str) -> bool:
    """True for a quantity, and for an expression or a list without words."""
    if QUANTITY.fullmatch(text):
        return True
    runs = RUN.findall(LATEX.sub(" ", text))
    wordy = any((len(run) > 2 or run.casefold() in SHORT) and run.casefold() not in FUNCTIONS for run in runs)
    return not wordy and any(sign.isalnum() for sign in text)


def unmarked(text: str, begin: int, end: int, wanted: Wanted) -> Span | None:
    aside = ASIDE.search(text, begin, end)
    if aside and text[begin : aside.start()].strip():
        end = aside.start()
    begin, end = begin, begin + len(text[begin:end].rstrip())
    if wanted is Wanted.number:
        return leading(text, begin, end) or last_value(text, begin, end) or last_words(text, begin, end, False)
    chosen = last_letter(text, begin, end) if wanted is Wanted.letter else None
    return chosen or last_words(text, begin, end, True) or last_value(text, begin, end)


def leading(text: str, begin: int, end: int) -> Span | None:
    """The answer that a text begins with, before it explains."""
    found = LEADING.match(text, begin, end)
    if found is None or found[0].strip() == "1" or CORRECTED.search(text, found.end(), end):
        return None
    explains = text.startswith(" (", found.end()) or any(map(str.isalpha, text[found.end() : end]))
    return next(tokens_of(text, *found.span()), None) if explains else None


def lines(text: str, begin: int, end: int) -> Iterator[Span]:
    """From the last one on."""
    while end > begin:
        start = max(text.rfind("\n", begin, end) + 1, begin)
        yield max(start, end - LINE), end
        end = start - 1


def last_value(text: str, begin: int, end: int) -> Span | None:
    """The last bold or displayed value, number or expression of the last line that has one. A line cut off at ``=`` has none."""
    if text[begin:end].endswith("="):
        return None
    for start, stop in lines(text, begin, end):
        for bold in reversed(list(EMPHASIS.finditer(text, start, stop))):
            inner = bold.span(bold.lastgroup or 0)
            if (
                text[inner[1] - 1] != ":"
                and any(map(str.isdigit, text[slice(*inner)]))
                and (span := value(text, *inner, Wanted.number))
            ):
                return span
        if span := last_of_line(text, start, stop):
            return span
    return None


def last_of_line(text: str, start: int, stop: int) -> Span | None:
    equals = list(EQUALS.finditer(text, start, stop))
    if equals:
        after = trimmed(text, equals[-1].end(), stop, " \t*_$\\[]")
        if is_mathematics(text[slice(*after)]) and not re.search(r"\$|\\[\])]", text[slice(*after)]):
            return after
        behind = list(tokens_of(text, equals[-1].end(), stop))
        if behind:
            goes_on = re.search(
                r"\b(?:so|then|therefore|thus|hence|total|gives?|giving|and)\b", text[behind[0][1] : stop]
            )
            return behind[-1] if goes_on else behind[0]
    tokens = list(tokens_of(text, start, stop))
    return tokens[-1] if tokens else None


def tokens_of(text: str, begin: int, end: int) -> Iterator[Span]:
    """Values with their units; labels such as "step 2", and sums and quotients that nobody has computed, are none."""
    for found in TOKEN.finditer(text, begin, end):
        kind = found.lastgroup
        if found["display"]:
            inner = next(found.span(name) for name in ("dollars", "brackets", "parens", "dollar") if found[name])
            if not SUM.fullmatch(text[slice(*inner)]) and (span := value(text, *inner, Wanted.number)):
                yield span
        elif found["number"]:
            quotient = QUOTIENT.fullmatch(found[0])
            if quotient and (int(quotient[2][:9]) == 0 or int(quotient[1][:9]) % int(quotient[2][:9]) == 0):
                continue
            yield found.start(), with_unit(text, found.end(), end)
        elif kind:
            yield found.span()


def with_unit(text: str, at: int, end: int) -> int:
    """The end of a number with the words that change it, or measure it."""
    while (unit := UNIT.match(text, at, end)) and (unit[1] is None or unit[1].casefold().replace(".", "") in COUNTED):
        at = unit.end()
        if unit[1] is None:
            break
    return at


def last_letter(text: str, begin: int, end: int) -> Span | None:
    found = list(CHOSEN.finditer(text, begin, end))
    if sum(one["line"] is not None for one in found) > 1:  # the options, listed once more
        found = [one for one in found if one["line"] is None]
    return next((one.span(one.lastindex or 0) for one in reversed(found[-MANY:])), None)


def last_words(text: str, begin: int, end: int, reads: bool) -> Span | None:
    """The last line where it is a few words; ``reads``: else what the text says by "Yes, …", in bold, or at its end ("It is Paris.")."""
    start, stop = next(lines(text, begin, end), (begin, end))
    start, stop = trimmed(text, start, stop)
    said = text[start:stop].split()
    cut = text[stop : stop + 1] == ":" or (said and said[-1].casefold() in SHORT)
    few = 0 < len(said) <= 4 and not cut and words(text[start:stop]) is not None
    if few and not (reads and PREDICATE.search(text, start, stop)):
        return start, stop
    if not reads:
        return None
    if spoken := list(SPOKEN.finditer(text, begin, end)):
        return spoken[-1].span(1)
    if bold := list(EMPHASIS.finditer(text, begin, end)):
        return trimmed(text, *bold[-1].span(bold[-1].lastgroup or 0))
    ends = PREDICATE.search(text, start, stop)
    if ends is None:
        return None
    ended = END.search(text, *ends.span(1))
    start, stop = trimmed(text, ends.start(1), ended.start() if ended else stop)
    return (start, stop) if len(text[start:stop].split()) <= 3 else None
