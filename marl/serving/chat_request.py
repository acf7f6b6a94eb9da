"""The body of a chat completion's request: every field is checked, and honoured or refused by its name. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl.serving.refusals import TOO_LONG, Refused, short, wrong
from marl.types import Message
from marl.utils.numbers import TOP_K, TOP_P, Number, count
from marl.utils.registry import did_you_mean

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
LARGEST_N = 128
MOST_MESSAGES = 4096
MOST_STOPS, LONGEST_STOP = 16, 1000
CHARACTERS_PER_TOKEN = 32
"""More than any text has: a longer one is refused before it is encoded."""
SAMPLING = {"temperature": Number(0, 2), "top_p": TOP_P, "top_k": TOP_K}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
"""Fields that a team does not have: these values, and null, ask for nothing."""
UNREAD = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")
"""Fields that change no answer."""
READ = (
    "model", "messages", "n", "seed", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens", *SAMPLING,
)  # fmt: skip


@dataclass(frozen=True)
class ChatRequest:
    model: str
    messages: list[Message]
    sampling: Mapping[str, Any]
    """Sampling parameters that the request sets: temperature, top_p, top_k, max_tokens, stop."""
    n: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    """A stream ends with the usage."""


def read_request(body: Any, longest: Mapping[str, int]) -> ChatRequest:
    """``longest``: the most tokens of an answer, by model. Raises Refused."""
    if not isinstance(body, Mapping):
        raise Refused(400, "the body is not a JSON object; expected {'model': …, 'messages': […]}", "invalid_body")
    given = {key: value for key, value in body.items() if value is not None}
    refuse_unknown(given)
    model = given.get("model")
    if not isinstance(model, str) or model not in longest:
        hint = did_you_mean(model, longest) if isinstance(model, str) else ""
        raise Refused(
            404,
            f"model={short(repr(model))}: no such model;{hint} expected one of {', '.join(longest)}",
            "model_not_found",
            "model",
        )
    options = given.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise wrong("stream_options", options, "{'include_usage': true}")
    return ChatRequest(
        model,
        messages_of(given.get("messages")),
        sampling_of(given, longest[model]),
        number(given, "n", count(1, LARGEST_N), 1),
        number(given, "seed", Number(-(2**63), 2**63 - 1, whole=True), None),
        flag(given, "stream"),
        flag(options, "include_usage"),
    )


def refuse_unknown(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in NEUTRAL and value not in NEUTRAL[key]:
            raise Refused(
                400, f"{key}: a team of agents does not support it; leave it out", "unsupported_parameter", key
            )
        if key not in (*READ, *NEUTRAL, *UNREAD):
            hint = did_you_mean(key, READ)
            raise Refused(
                400, f"{short(key)}: unknown field;{hint} expected some of {', '.join(READ)}", "unknown_parameter", key
            )


def messages_of(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of at least one message {'role': 'user', 'content': '…'}")
    if len(messages) > MOST_MESSAGES:
        raise too_long(f"{len(messages)} messages", f"at most {MOST_MESSAGES}")
    read = [message_of(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if read[-1]["role"] != "user":
        raise wrong("messages[-1].role", messages[-1]["role"], "user: the last message is what the team answers")
    if not read[-1]["content"].strip():
        raise wrong("messages[-1].content", read[-1]["content"], "a question")
    return read


def must_be_readable(messages: Sequence[Message], max_prompt_length: int) -> None:
    """Raise Refused for texts that are too long for so many tokens, whatever the tokenizer."""
    size, most = sum(len(message["content"]) for message in messages), max_prompt_length * CHARACTERS_PER_TOKEN
    if size > most:
        tokens = (
            f"{max_prompt_length} tokens (data.max_prompt_length), and of {CHARACTERS_PER_TOKEN} characters for each"
        )
        raise too_long(f"{size} characters", f"a conversation of at most {tokens}")


def too_long(given: str, expected: str) -> Refused:
    return Refused(
        400, f"messages: {given}, the conversation is too long for the team; expected {expected}", TOO_LONG, "messages"
    )


def message_of(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise wrong(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(text_of(part, f"{where}.content") for part in content)
    if not isinstance(content, str):
        raise wrong(f"{where}.content", content, "a text, or parts of type text")
    return {"role": ROLES[role], "content": content}


def text_of(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise wrong(where, part, "parts {'type': 'text', 'text': …} alone: the agents read text")
    return str(part["text"])


def sampling_of(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    asked = {key: number(given, key, bound, None) for key, bound in SAMPLING.items() if key in given}
    for key in ("max_tokens", "max_completion_tokens"):
        if key in given:
            expected = (
                f"must be a whole number of 1 to {longest}, the longest answer of this team (data.max_response_length)"
            )
            asked["max_tokens"] = number(given, key, count(1, longest, expected=expected), None)
    if "stop" in given:
        asked["stop"] = stops_of(given["stop"])
    return asked


def stops_of(stop: Any) -> list[str]:
    stops: Sequence[Any] = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(map(is_stop, stops)):
        expected = f"a text, or a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} characters"
        raise wrong("stop", stop, expected)
    return list(stops)


def is_stop(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= LONGEST_STOP


def number(given: Mapping[str, Any], key: str, bound: Number, default: Any) -> Any:
    value = given.get(key, default)
    if key in given and not bound.takes(value):
        raise wrong(key, value, str(bound).removeprefix("expected ").removeprefix("must be "))
    return value


def flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return value
