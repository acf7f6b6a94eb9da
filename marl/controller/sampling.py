"""Sampling parameters of a turn. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.config.schema import AgentConfig


def with_asked(sampling: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """An agent's sampling parameters as a request changes them; an agent's own limit on its answers stays the most."""
    merged = {**sampling, **asked}
    merged["max_tokens"] = min(sampling["max_tokens"], merged["max_tokens"])
    if asked.get("stop"):
        merged["stop"] = list(dict.fromkeys([*(sampling.get("stop") or ()), *asked["stop"]]))
    return merged


def sampling_of(rollout: Any, own: AgentConfig, validate: bool) -> dict[str, Any]:
    """The policy's sampling parameters, with what the agent sets for itself when it trains."""
    source = rollout.val_kwargs if validate else rollout
    sampling = {key: source[key] for key in ("temperature", "top_p", "top_k")} | {"max_tokens": rollout.response_length}
    if validate and not source.do_sample:
        sampling["temperature"] = 0.0
    keys = ("max_tokens",) if validate else ("temperature", "top_p", "top_k", "max_tokens")
    sampling |= {key: value for key in keys if (value := getattr(own, key)) is not None}
    if own.stop:
        sampling["stop"] = list(own.stop)
    return sampling
