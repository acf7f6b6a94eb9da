"""Columns of a data file's rows. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.methods.examples import Speakers
from marl.types import AgentId, Message

AGENT = "agent"
"""Column that names the agent whom a row teaches; without it a row is for all."""


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
    private = (value_of(row, "extra_info.agent_prompts") or {}).get(agent)
    prompt = private or value_of(row, key)
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{key} is {str(prompt)[:80]!r}; expected text or a list of messages")
    return prompt


def text_of(row: Mapping[str, Any], key: str, agent: AgentId) -> str:
    """A text, or an agent's own where the column holds one for each."""
    value = value_of(row, key)
    if isinstance(value, Mapping):
        value = value.get(agent)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # messages, as others write preferences
        value = value[-1].get("content")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is {str(value)[:80]!r}; expected a text")
    return value


def conversation(row: Mapping[str, Any], prompt_key: str, answer_key: str, agent: AgentId) -> list[Message]:
    answer = {"role": "assistant", "content": text_of(row, answer_key, agent)}
    return [*prompt_of(row, prompt_key, agent), answer]
