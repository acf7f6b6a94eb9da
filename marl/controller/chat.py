"""Messages to token ids: the only file that knows chat templates.

A context grows append-only *in ids*: an observation that continues an agent's last one and its answer keeps the ids that
the server took and gave, and only what is new is encoded. The template is encoded with its special tokens, what a
message says without them, so that no text can forge a role.
"""

import copy
import re
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from marl.controller.encoding import TextEncoder, matches_any
from marl.controller.thinking import KNOWN, Thinking, layout_of, marks_of, until_stop
from marl.types import Message, Turn
from marl.utils.cache import cached_by_bytes

MARK = "MARL{index}CONTENT"
MARKS = re.compile(r"MARL(\d+)CONTENT")
THOUGHT, ANSWER = "MARLTHOUGHT", "MARLANSWER"
WHY: list[Message] = [{"role": "user", "content": "why"}]
PAD = "\v"
"""Whitespace that no template produces."""
PADDED = re.compile(rf"({PAD}?){MARKS.pattern}({PAD}?)")


@dataclass(frozen=True)
class Frame:
    """The template's text before, between and after the contents of messages with certain roles."""

    pieces: list[array]
    """Ids; one more than there are contents."""
    texts: list[str]
    """Text of each piece, including a space before a content."""
    leads: list[tuple[str, bool]]
    """For each content, its leading space, which belongs to its first word, and whether it continues a text."""
    trims: list[tuple[bool, bool]]
    """For each content, whether the template trims its beginning, and its end."""

    def content(self, index: int, text: str) -> tuple[str, bool]:
        """A content as the template renders it, and whether it continues a text."""
        (space, inside), (left, right) = self.leads[index], self.trims[index]
        text = text.lstrip() if left else text
        return space + (text.rstrip() if right else text), inside

    def __sizeof__(self) -> int:
        return sum(map(sys.getsizeof, [*self.pieces, *self.texts, *self.leads, *self.trims]))


class ChatEncoder:
    """Encodes observations for one tokenizer. Raises ValueError where the template or the tokenizer cannot be used."""

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, thinking: Any = "auto"
    ) -> None:
        """``thinking``: see ``controller.thinking``."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer at {tokenizer.name_or_path!r} has no chat template; use an instruct model, "
                "or set actor_rollout_ref.model.custom_chat_template"
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        template = str(tokenizer.chat_template)
        marks = marks_of(thinking, template)
        self.thinking = (
            Thinking(tokenizer, marks, layout_of(marks, *self._shown(THOUGHT), THOUGHT, ANSWER)) if marks else None
        )
        spelt = [mark for known in (*KNOWN, marks) if known for mark in (known.start, known.end)]
        control = control_tokens(tokenizer, "".join([template, *spelt]))
        self.special = special_tokens(tokenizer, control)
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = added | set(tokenizer.all_special_ids)
        self.texts = TextEncoder(tokenizer, control)
        self._frame = cached_by_bytes(self._encode_frame, sys.getsizeof)
        self._content = cached_by_bytes(self._encode_content, sys.getsizeof)

    def encode(self, observation: Sequence[Message], previous: Turn | None = None) -> list[int]:
        """Ids of an observation and the generation prompt after it."""
        frame = self._frame(roles_of(observation))
        pieces, contents = frame.pieces, [content_of(message) for message in observation]
        if previous is not None and extends(observation, previous) and self._goes_on(frame, previous):
            answered = len(previous.observation)
            ids, start = [*previous.prompt_ids, *previous.response_ids], answered + 1
            ids.extend(self._after_answer(previous.response_ids, pieces[start]))
        else:
            ids, start = list(pieces[0]), 0
        for index in range(start, len(observation)):
            ids.extend(self._content(*frame.content(index, contents[index])))
            ids.extend(pieces[index + 1])
        return ids

    def read(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> tuple[str | None, str]:
        """The thought of a response, None where there is none, and the text that everybody is shown."""
        if self.thinking is None:
            return None, self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return self.thinking.read(ids, self.thinking.opened_by(prompt_ids))

    def may_think(self, prompt_ids: Sequence[int]) -> bool:
        """True if a response may begin with a thought, in which no stop string may end it."""
        return self.thinking is not None and not self.thinking.closed_by(prompt_ids)

    def until_stop(self, prompt_ids: Sequence[int], ids: Sequence[int], stops: Sequence[str]) -> int | None:
        """Number of response tokens up to its first stop string after the thought; None for all of them."""
        if not stops:
            return None
        if self.thinking is None:
            return until_stop(ids, stops, self.tokenizer.decode)
        return self.thinking.until_stop(ids, stops, self.thinking.opened_by(prompt_ids))

    @cached_property
    def keeps_thoughts(self) -> bool:
        """True if the template keeps the thought of an earlier answer."""
        if self.thinking is None:
            return True
        marks = self.thinking.marks
        said = {"role": "assistant", "content": f"{marks.start}{THOUGHT}{marks.end}so"}
        return THOUGHT in self._render([*WHY, said, *WHY])

    def _goes_on(self, frame: Frame, previous: Turn) -> bool:
        """True if the template renders the previous turn as its ids have it: same text around it, the thought kept."""
        size = len(previous.observation)
        asked = self._frame(roles_of(previous.observation)).texts
        same = frame.texts[:size] == asked[:size] and frame.texts[size].rstrip() == asked[size].rstrip()
        return same and (previous.thought is None or self.keeps_thoughts)

    def answer(self, text: str) -> list[int]:
        """Ids of an answer's text and its end: what a model of this tokenizer would have said."""
        return [*self._content(text, False), self.tokenizer.eos_token_id]

    def reply(self, text: str, prompt_ids: Sequence[int] = (), thought: str | None = None) -> list[int]:
        """Ids of an answer's text and of the token with which the template ends an answer, as a model says them after this prompt:
        the marks of a thought at its beginning are the template's, and a thought that the prompt opens is closed. ``thought``: one
        that is apart from the text; a template without thoughts leaves it out."""
        if self.thinking is None:
            return [*self._plain(text), self.end_of_reply]
        marks = self.thinking.marks.start, self.thinking.layout.closing
        tokens = [mark for mark in marks if self.texts.added.search(mark)]
        own = self.thinking
        parts = own.parts(text, prompt_ids) if thought is None else own.parts_of(thought, text, prompt_ids)
        if parts == [text]:
            return [*self._plain(text), self.end_of_reply]
        ids: list[int] = []
        inside = False
        for is_token, group in groupby(filter(None, parts), tokens.__contains__):
            part = "".join(group)  # a mark that is no token is text like what stands beside it
            ids += self.texts.template(part, inside) if is_token else self._content(part, inside)
            inside = not is_token or self.texts.goes_on(part, inside)
        return [*ids, self.end_of_reply]

    @cached_property
    def end_of_reply(self) -> int:
        """The first special token after a last answer, or where there is none after one that a message follows; the end-of-text token
        where there is none either."""
        last = self.texts.template(self._shown()[0].rpartition(ANSWER)[2], True)
        followed = self._frame(("user", "assistant", "user")).pieces[2]
        return next((token for token in (*last, *followed) if token in self.special_ids), self.tokenizer.eos_token_id)

    @cached_property
    def _heading(self) -> str:
        """The template's tokens that an answer without a thought begins with, as ``<|channel|>final<|message|>``."""
        shown, prompt = self._shown()
        before = shown.rpartition(ANSWER)[0]
        heading = before.removeprefix(prompt)
        thinks = any(marks.start in heading for marks in KNOWN)
        return heading if before.startswith(prompt) and self.texts.added.match(heading) and not thinks else ""

    def _plain(self, text: str) -> list[int]:
        """Ids of an answer without a thought."""
        heading = self._heading
        inside = bool(heading) and self.texts.goes_on(heading, False)
        return [*(self.texts.template(heading, False) if heading else ()), *self._content(text, inside)]

    def _shown(self, thought: str | None = None) -> tuple[str, str]:
        """An answer as the template renders the last message, with its thought if the template takes one, and its prompt; nothing
        where the template takes no such messages."""
        said: Message = {"role": "assistant", "content": ANSWER}
        said |= dict.fromkeys(("reasoning_content", "thinking"), thought) if thought else {}
        try:
            return self._render([*WHY, said], add_generation_prompt=False), self._render(WHY)
        except Exception:  # a template's own error: it takes other messages
            return "", ""

    def defused(self, observation: Sequence[Message]) -> list[Message]:
        """A copy, with a space in every special token that a text spells: others encode texts with special tokens enabled,
        and a text must not forge a role there either."""
        return [
            {**copy.deepcopy(message), "content": self.special.sub(broken, content_of(message))}
            for message in observation
        ]

    def _after_answer(self, answer: Sequence[int], after: array) -> array:
        """The template's ids after an answer, from where the answer ended: one that was stopped already has its
        end-of-turn token, a truncated one does not."""
        end = next((i for i, token in enumerate(after) if token in self.special_ids), None)
        return after if end is None or list(answer[-1:]) != [after[end]] else after[end + 1 :]

    def _encode_content(self, text: str, inside: bool) -> array:
        return array("i", self.texts.text(text, inside))

    def _encode_frame(self, roles: tuple[str, ...]) -> Frame:
        marked = [{"role": role, "content": MARK.format(index=i)} for i, role in enumerate(roles)]
        rendered = self._render(marked)
        shown = [int(index) for index in MARKS.findall(rendered)]
        if shown != list(range(len(roles))):
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not show the messages {roles} once each, in "
                f"order (it shows {shown}); set actor_rollout_ref.model.custom_chat_template to one that does"
            )
        texts = MARKS.split(rendered)[::2]
        frame, inside = Frame([], texts, [], self._trims(roles)), False
        *before_contents, end = texts
        for text in before_contents:
            piece = text.removesuffix(" ")
            frame.pieces.append(array("i", self.texts.template(piece, inside)))
            frame.leads.append((text[len(piece) :], self.texts.goes_on(piece, inside)))
            inside = True
        frame.pieces.append(array("i", self.texts.template(end, inside)))
        return frame

    def _trims(self, roles: tuple[str, ...]) -> list[tuple[bool, bool]]:
        """See :class:`Frame`."""
        padded = [{"role": role, "content": f"{PAD}{MARK.format(index=i)}{PAD}"} for i, role in enumerate(roles)]
        shown = {int(found[2]): (not found[1], not found[3]) for found in PADDED.finditer(self._render(padded))}
        return [shown[index] for index in range(len(roles))]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self.template_kwargs
        )


def roles_of(observation: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message["role"] for message in observation)


def control_tokens(tokenizer: Any, template: str) -> set[str]:
    """Added tokens beside the special ones that a template writes, such as ``</think>`` of Qwen3: no text may spell them."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if not token.special}
    return {token for token in added if token in template and re.search(r"[<\[|◁]", token)}


def special_tokens(tokenizer: Any, control: Collection[str] = ()) -> re.Pattern[str]:
    """Matches the tokens that a text may not spell; the unknown token stands for no role."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return matches_any((added | set(control) | set(tokenizer.all_special_tokens)) - {tokenizer.unk_token})


def broken(match: re.Match[str]) -> str:
    return f"{match[0][:1]} {match[0][1:]}" if len(match[0]) > 1 else " "


def content_of(message: Message) -> str:
    if not isinstance(message.get("content"), str):
        raise ValueError(
            f"message content must be text, got {message.get('content')!r} in a {message.get('role')!r} message"
        )
    return message["content"]


def extends(observation: Sequence[Message], previous: Turn) -> bool:
    """True if an observation begins with the previous one and its answer, and the answer's ids hold nothing else."""
    size = len(previous.observation)
    return (
        len(observation) > size
        and bool(previous.prompt_ids)  # a turn that was read from a dump has none
        and 0 not in previous.response_mask  # what tools said within the turn is not in the observation
        and list(observation[:size]) == previous.observation
        and observation[size] == {"role": "assistant", "content": previous.text}
    )


def check_round_trip(tokenizer: Any, texts: Sequence[str]) -> None:
    """Raises ValueError naming the first text that does not survive encoding and decoding, or that smuggles a special token."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        decoded = tokenizer.decode(ids)
        if tokenizer.encode(decoded, add_special_tokens=False, split_special_tokens=True) != ids or not ids:
            raise ValueError(
                f"the tokenizer at {tokenizer.name_or_path!r} does not round-trip {text!r}: {ids} decodes to {decoded!r}. "
                "A custom tokenizer beside a config.json may have been loaded as the model's own class; keep it in a "
                "folder of its own and set actor_rollout_ref.model.tokenizer_path"
            )
    for token in set(tokenizer.all_special_tokens) - {tokenizer.unk_token}:
        ids = tokenizer.encode(token, add_special_tokens=False, split_special_tokens=True)
        if tokenizer.convert_tokens_to_ids(token) in ids:
            raise ValueError(
                f"the tokenizer at {tokenizer.name_or_path!r} encodes the text {token!r} as the special token itself, so "
                "that one agent could forge another's role; use a fast tokenizer"
            )
