"""Sampling parameters of a turn. Pure."""

from collections.abc import Mapping
from typing import Any


def with_asked(sampling: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """An agent's sampling parameters as a request changes them; an agent's own limit on its answers stays the most."""
    merged = {**sampling, **asked}
    merged["max_tokens"] = min(sampling["max_tokens"], merged["max_tokens"])
    if asked.get("stop"):
        merged["stop"] = list(dict.fromkeys([*(sampling.get("stop") or ()), *asked["stop"]]))
    return merged
