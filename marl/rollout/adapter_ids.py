"""Adapters that a policy's servers hold under ``sharing=lora``, as trainer and server number them."""

from typing import Any


def adapter_ranks(config: Any) -> dict[str, int]:
    """Every policy of the pool with the rank of its adapter; none where servers hold whole models. ``config``: a policy's
    ``rollout``."""
    return dict(config.custom.get("adapters") or {})


def adapter_ids(config: Any) -> dict[str, int]:
    """Number of every adapter in vLLM, from 1."""
    return {name: index for index, name in enumerate(adapter_ranks(config), start=1)}
