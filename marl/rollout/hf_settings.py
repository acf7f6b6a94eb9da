"""Settings of the ``hf`` server, under ``rollout.custom``: verl's dataclass of a rollout has no room for other keys."""

from collections.abc import Mapping
from typing import Any

from marl.config.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
PREFIX_BYTES = 1 << 30


def is_exact(config: Any) -> bool:
    """``exact``, on by default: an answer depends on seed and prompt alone, bit for bit, so that a run can be repeated. Off, what
    was read before moves log-probs by 1e-7, and a token in some ten million."""
    exact = config.custom.get("exact", True)
    if not isinstance(exact, bool):
        raise ConfigError(f"{ROLLOUT}.custom.exact={exact!r}; expected true or false; leave it out for true")
    return exact


def prefix_bytes(custom: Mapping[str, Any] | None) -> int:
    """``prefix_bytes``: of keys and values of earlier conversations that a server keeps while ``rollout.enable_prefix_caching`` is
    on, 1 GiB by default."""
    most = (custom or {}).get("prefix_bytes", PREFIX_BYTES)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise ConfigError(
            f"{ROLLOUT}.custom.prefix_bytes={most!r}; expected a whole number of bytes, as in 4294967296 for 4 GiB; leave it out for "
            "1 GiB"
        )
    return most
