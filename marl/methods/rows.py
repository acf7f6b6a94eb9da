"""Columns of a data file's rows. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.methods.examples import Speakers
from marl.types import AgentId, Message

AGENT = "agent"
"""Column that names the agent whom a row teaches; without it a row is for all."""

PRIVATE = "extra_info.agent_prompts"
EXPECTED = "expected a list of messages [{'role': 'user', 'content': '…'}], whose contents are texts"


def value_of(row: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key; None where it is missing."""
    node: Any = row
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return node


def speakers_of(row: Mapping[str, Any], speakers: Speakers) -> Speakers:
    agent = row.get(AGENT)
    if agent is None:
        return speakers
    if agent not in speakers:
        raise ValueError(f"agent={agent!r} is no trained agent; expected one of {', '.join(speakers)}")
    return {agent: speakers[agent]}


def prompt_of(row: Mapping[str, Any], key: str, agent: AgentId) -> list[Message]:
    """An agent's own prompt (``extra_info.agent_prompts``), or the row's, as messages."""
    prompts = value_of(row, PRIVATE)
    private = prompts.get(agent) if isinstance(prompts, Mapping) else None
    if private is not None:
        return messages_of(private, f"{PRIVATE}.{agent}")
    prompt = value_of(row, key)
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    return messages_of(prompt, key)


def messages_of(value: Any, key: str) -> list[Message]:
    """Messages of text. Raises ValueError for others, and for an empty one of the assistant, which would teach to end at once."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {shown(value)}; {EXPECTED}")
    for message in value:
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in ("role", "content"))
        if not isinstance(role, str) or not role or not isinstance(content, str):
            raise ValueError(f"{key} holds {shown(message)}; {EXPECTED}")
        if role == "assistant" and not content.strip():
            raise ValueError(f"{key} holds an empty message of the assistant; expected a text in each")
    return value


def shown(value: Any) -> str:
    """A value in a message, not longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def text_of(row: Mapping[str, Any], key: str, agent: AgentId) -> str:
    """A text, or an agent's own where the column holds one for each."""
    value = value_of(row, key)
    if isinstance(value, Mapping):
        value = value.get(agent)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # messages, as others write preferences
        value = value[-1].get("content")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} is {shown(value)}; expected a text")
    return value


def conversation(row: Mapping[str, Any], prompt_key: str, answer_key: str, agent: AgentId) -> list[Message]:
    answer = {"role": "assistant", "content": text_of(row, answer_key, agent)}
    return [*prompt_of(row, prompt_key, agent), answer]
