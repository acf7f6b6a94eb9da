"""Separation of a reasoning model's thought from the answer that follows it."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any

from marl.controller.encoding import matches_any

PROMPT_END = 16
"""Tokens of a prompt's end in which a template opens or closes a thought."""


@dataclass(frozen=True)
class Marks:
    """Start and end marks of a thought."""

    start: str
    end: str


@dataclass(frozen=True)
class Layout:
    """How a template's models write a thought and the answer after it."""

    closing: str
    """The end mark, with the template's tokens around it."""
    lead: str = ""
    """White space before the start mark."""
    before: str = ""
    """White space between the start mark and the thought."""
    after: str = ""
    """White space between the thought and ``closing``."""
    answer: str = ""
    """White space between ``closing`` and the answer."""


KNOWN = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
)


def marks_of(setting: Any, template: str) -> Marks | None:
    """The marks of ``controller.thinking``: for ``auto`` the first known ones whose end the chat template mentions."""
    if setting == "auto":
        return next((marks for marks in KNOWN if marks.end in template), None)
    return None if setting == "none" else Marks(setting["start"], setting["end"])


def layout_of(marks: Marks, rendered: str, prompt: str, thought: str, answer: str) -> Layout:
    """The layout in a template's rendering of this thought and this answer after this prompt; where it does not show them, what most
    models of these marks write."""
    response = rendered.removeprefix(prompt)
    begins = rendered.startswith(prompt) and response.lstrip().startswith(marks.start)
    lead = response[: len(response) - len(response.lstrip())] if begins else ""
    found = re.search(rf"{re.escape(marks.start)}(\s*){thought}(\s*)(\S(?:.*\S)?)(\s*){answer}", rendered, re.DOTALL)
    if found and marks.end in found[3]:
        before, after, closing, gap = found.groups()
        return Layout(closing, lead, before, after, gap)
    closing = glue_of(marks) + marks.end
    return Layout(closing, "", "\n", "\n", "\n\n") if marks.end == "</think>" else Layout(closing)


def glue_of(marks: Marks) -> str:
    """What a template writes between a thought and the end mark."""
    return "<|end|><|start|>assistant" if marks.end == "<|channel|>final<|message|>" else ""


def until_stop(
    ids: Sequence[int], stops: Sequence[str], read: Callable[[list[int]], str], start: int = 0
) -> int | None:
    """Number of tokens up to the end of the first stop string in the text that ``read`` returns, from ``start`` on; None
    without one."""

    def stopped(size: int) -> bool:
        text = read(list(ids[:size]))
        return any(stop in text for stop in stops)

    return bisect_left(range(len(ids)), True, lo=start, key=stopped) if stopped(len(ids)) else None


class Thinking:
    """Reads the responses of one tokenizer's models."""

    def __init__(self, tokenizer: Any, marks: Marks, layout: Layout | None = None) -> None:
        self.tokenizer, self.marks = tokenizer, marks
        self.layout = layout or layout_of(marks, "", "", "", "")
        self.added = tokenizer.get_added_vocab()
        self.special = matches_any(tokenizer.all_special_tokens)

    def opened_by(self, prompt_ids: Sequence[int]) -> bool:
        """True if the prompt ends within a thought: templates like DeepSeek-R1's open it themselves."""
        return self._ends_with(prompt_ids, self.marks.start)

    def closed_by(self, prompt_ids: Sequence[int]) -> bool:
        """True if the prompt ends with an empty thought, so that the answer follows at once."""
        return self._ends_with(prompt_ids, self.marks.end)

    def _ends_with(self, prompt_ids: Sequence[int], mark: str) -> bool:
        return self._end_of(prompt_ids).rstrip().endswith(mark)

    def _space_after(self, prompt_ids: Sequence[int]) -> str:
        """The white space at the prompt's end, which a thought does not repeat."""
        end = self._end_of(prompt_ids)
        return end[len(end.rstrip()) :]

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(prompt_ids[-PROMPT_END:]))

    def read(self, ids: Sequence[int], opened: bool) -> tuple[str | None, str]:
        """The thought, None where there is none, and the answer, empty where the thought was never closed."""
        size = self._end_of_thought(ids)
        open_again = self._last(ids[size:], self.marks.start) is not None
        if open_again or (opened and not size):
            return self._thought(self._text(ids)), ""
        answer = self.tokenizer.decode(list(ids[size:]), skip_special_tokens=True)
        if not size:
            return None, answer
        # where the end mark is several tokens, the last of them may go on after it
        thought, _, rest = self._text(ids[:size]).rpartition(self.marks.end)
        return self._thought(self._without_glue(thought)), (rest + answer).lstrip()

    def _without_glue(self, thought: str) -> str:
        """Without what the template writes between a thought and the end mark."""
        return thought.removesuffix(self.layout.closing.partition(self.marks.end)[0])

    def parts(self, text: str, prompt_ids: Sequence[int] = ()) -> list[str]:
        """A response's text as the template's marks and what stands between them: the marks of a thought that it begins with. A
        thought that the prompt opens is closed where the text has none."""
        said, opened = text.lstrip(), self.opened_by(prompt_ids)
        begins = said.startswith(self.marks.start)
        thought, end, answer = said.removeprefix(self.marks.start).partition(self.marks.end)
        if end and (begins or opened):
            return self._parts(self._without_glue(thought), answer, prompt_ids)
        return [self.layout.closing, f"{self.layout.answer}{text}"] if opened else [text]

    def parts_of(self, thought: str, text: str, prompt_ids: Sequence[int] = ()) -> list[str]:
        """The same of a thought and the answer after it, laid out as the template's models do."""
        own = self.layout
        return self._parts(f"{own.before}{thought}{own.after}", f"{own.answer}{text}", prompt_ids)

    def _parts(self, thought: str, answer: str, prompt_ids: Sequence[int]) -> list[str]:
        """A thought that the prompt opens is not opened again; of one that it closes, the answer is left."""
        if self.closed_by(prompt_ids):
            return [answer.lstrip() if self._space_after(prompt_ids) else answer]
        if self.opened_by(prompt_ids):
            return [thought.removeprefix(self._space_after(prompt_ids)), self.layout.closing, answer]
        return [self.layout.lead, self.marks.start, thought, self.layout.closing, answer]

    def until_stop(self, ids: Sequence[int], stops: Sequence[str], opened: bool) -> int | None:
        """Number of tokens up to the end of the first stop string outside of thoughts; None if there is none."""
        said = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        if not any(stop in said for stop in stops):
            return None  # a response that runs on may hold hundreds of marks
        for start, end in self._answers(ids, opened):
            size = until_stop(ids[:end], stops, lambda part: self.read(part, opened)[1], start)
            if size is not None:
                return size
        return None

    def _answers(self, ids: Sequence[int], opened: bool) -> Iterator[tuple[int, int]]:
        """Start and end of each stretch outside of thoughts, in order. What an end mark ends is a thought if no mark stands
        before it, and an answer after another end mark."""
        start = None if opened else 0
        for begin, size, closes in merge(self._places(ids, self.marks.start), self._places(ids, self.marks.end)):
            if start is not None and not (closes and not start):
                yield start, begin
            start = size if closes else None
        if start is not None:
            yield start, len(ids)

    def _end_of_thought(self, ids: Sequence[int]) -> int:
        """Number of tokens up to the last end mark; 0 if there is none."""
        return self._last(ids, self.marks.end) or 0

    def _last(self, ids: Sequence[int], mark: str) -> int | None:
        """Number of tokens up to the end of the last mark, or None. A single-token mark is matched by its id only."""
        if mark in self.added:
            return next((i + 1 for i in range(len(ids) - 1, -1, -1) if ids[i] == self.added[mark]), None)
        count = self._text(ids).count(mark)
        return self._until(ids, mark, count) if count else None

    def _places(self, ids: Sequence[int], mark: str) -> Iterator[tuple[int, int, bool]]:
        """Of every mark, in order: the number of tokens before it, which includes one that it shares with a text, the number
        up to its end, and True if it is the end mark."""
        closes = mark == self.marks.end
        if mark in self.added:
            yield from ((i, i + 1, closes) for i, token in enumerate(ids) if token == self.added[mark])
            return
        for count in range(1, self._text(ids).count(mark) + 1):
            size = self._until(ids, mark, count)
            first = next(i for i in range(size - 1, -1, -1) if mark in self._text(ids[i:size]))
            yield first + (not self._text(ids[first:size]).startswith(mark)), size, closes

    def _until(self, ids: Sequence[int], mark: str, count: int) -> int:
        """Number of tokens up to the end of so many marks."""
        return bisect_left(range(len(ids)), count, key=lambda size: self._text(ids[:size]).count(mark))

    def _thought(self, text: str) -> str:
        """A thought's text without its marks; one in several parts has a line for each."""
        glue = self.layout.closing.partition(self.marks.end)[0]
        text = text.replace(f"{glue}{self.marks.start}", "\n") if glue else text
        for mark in (self.marks.start, self.marks.end):
            text = text.replace(mark, "")
        return self.special.sub("", text).strip()

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))
