"""OpenAI's chat completions: a request's body, and what an answer's body says. Pure.

An answer is another program's: every field is checked, and the error names it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl.config.endpoints import Endpoint
from marl.types import Message

SEEDS = 2**31
"""Servers differ in how large a seed may be; all take these."""
TOO_LONG = re.compile(
    r"context[ _](length|window|size|limit)|too many tokens"
    r"|(prompt|input|conversation)\b.{0,40}((?<!string )too long|longer than the max|exceeds the max)",
    re.IGNORECASE,
)
"""A conversation that the model cannot read, in the words of many servers. A field that is too large is none: a fault of
the configuration must not become an outcome."""
QUOTA = re.compile(r"insufficient_quota|credit balance", re.IGNORECASE)
"""A used-up account. Rate limits speak of billing and of quotas too, and pass."""


class NonsenseAnswer(ValueError):
    """Raised for an answer that is no chat completion."""


@dataclass(frozen=True)
class Reply:
    """One completion."""

    text: str
    thought: str | None
    truncated: bool
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tokens: int = 0
    """Tokens of prompt and answer, as the server counts them; estimated where it does not say."""


def request_body(
    endpoint: Endpoint, messages: Sequence[Message], sampling: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """The body of a request. ``sampling`` has our keys; those that are off are left out, as servers may not know them."""
    body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages), "seed": seed % SEEDS}
    body |= {key: sampling[key] for key in ("temperature", "top_p", "max_tokens", "stop") if key in sampling}
    if sampling.get("top_k", -1) > 0:
        body["top_k"] = sampling["top_k"]
    body |= {"logprobs": True} if endpoint.log_probs else {}
    body |= {"return_token_ids": True} if endpoint.token_ids else {}
    return {key: value for key, value in (body | endpoint.extra_body).items() if value is not None}


def read_reply(text: str, sent_characters: int) -> Reply:
    """The completion in an answer's body. Raises NonsenseAnswer naming the field, what it holds and what was expected."""
    body = mapping_of(parsed(text), "the body")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise NonsenseAnswer(f"choices={shown(choices)}; expected a list of at least one")
    choice = mapping_of(choices[0], "choices[0]")
    message = mapping_of(choice.get("message"), "choices[0].message")
    thought, truncated = thought_of(message), choice.get("finish_reason") == "length"
    said = content_of(message, empty_is_fine=truncated or thought is not None)
    ids, log_probs = ids_of(choice, "token_ids"), log_probs_of(choice)
    if ids and log_probs and len(ids) != len(log_probs):
        raise NonsenseAnswer(f"{len(log_probs)} log-probs for {len(ids)} token_ids; expected one a token")
    tokens = tokens_of(body.get("usage"), sent_characters + len(said) + len(thought or ""))
    return Reply(said, thought, truncated, ids_of(body, "prompt_token_ids"), ids, log_probs, tokens)


def listed_models(text: str) -> list[str]:
    """Names in a list of models; none where the body is no such list."""
    try:
        entries = json.loads(text)["data"]
        return [str(entry["id"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise NonsenseAnswer(f"the body is no JSON: {shown(text)}; expected a chat completion") from None


def mapping_of(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise NonsenseAnswer(f"{name}={shown(value)}; expected an object")
    return value


def content_of(message: Mapping[str, Any], empty_is_fine: bool) -> str:
    """The text; null only where a thought took the whole answer."""
    content = message.get("content")
    if content is None and empty_is_fine:
        return ""
    if not isinstance(content, str):
        raise NonsenseAnswer(f"choices[0].message.content={shown(content)}; expected text")
    return writable(content)


def thought_of(message: Mapping[str, Any]) -> str | None:
    """A reasoning model's thought, where the server separates it."""
    found = [message[key] for key in ("reasoning_content", "reasoning") if message.get(key)]
    if found and not isinstance(found[0], str):
        raise NonsenseAnswer(f"choices[0].message.reasoning_content={shown(found[0])}; expected text")
    return writable(found[0]).strip() if found else None


def writable(text: str) -> str:
    """A text without half characters, which JSON can hold and UTF-8 cannot: a server that counts in UTF-16 cuts an emoji in two."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def ids_of(node: Mapping[str, Any], key: str) -> list[int]:
    """Token ids, where the server gives them."""
    ids = node.get(key)
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise NonsenseAnswer(f"{key}={shown(ids)}; expected a list of whole numbers from 0")
    return ids


def log_probs_of(choice: Mapping[str, Any]) -> list[float]:
    """Log-probs of the answer's tokens, where the server gives them."""
    entries = (choice.get("logprobs") or {}).get("content") if isinstance(choice.get("logprobs"), Mapping) else None
    if entries is None:
        return []
    found: list[Any] = [entry.get("logprob") if isinstance(entry, Mapping) else entry for entry in listed(entries)]
    wrong = [value for value in found if type(value) not in (int, float) or not math.isfinite(value) or value > 1e-6]
    if wrong:
        raise NonsenseAnswer(f"logprobs that hold {shown(wrong)}; expected finite numbers of at most 0")
    return [float(value) for value in found]


def listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NonsenseAnswer(f"logprobs.content={shown(value)}; expected a list")
    return value


def tokens_of(usage: Any, characters: int) -> int:
    """Tokens of a request and its answer: ``usage`` where it is plausible, else a token for three characters."""
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return total if type(total) is int and total > 0 else -(-characters // 3)


def shown(value: Any) -> str:
    """A value in an error, cut and on one line."""
    return " ".join(str(value).split())[:120] or "nothing"
