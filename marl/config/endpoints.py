"""``policies.<name>.endpoint``: a policy that an OpenAI-compatible server answers for. Pure.

Its agents are never trained: there is no model, no worker and no weight sync behind it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from marl.config.policies import all_policies
from marl.utils.numbers import SECONDS, Number, bounded, count


@dataclass
class Endpoint:
    """Address, access and limits of a server. The access key is never a setting: ``api_key_env`` names its variable."""

    base_url: str = ""
    """Everything before ``/chat/completions``, as in ``https://api.example.com/v1``."""
    model: str = ""
    """The model's name on that server."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the access key; null for a server that asks for none."""
    timeout_s: float = bounded(60.0, SECONDS)
    """Deadline of one attempt."""
    deadline_s: float = bounded(300.0, SECONDS)
    """Deadline of a turn from its first attempt, with all waits and retries. Waiting for the rate limit is not counted."""
    max_attempts: int = bounded(5, count(1, 100))
    """Maximum number of attempts to get one turn."""
    backoff_s: float = bounded(1.0, SECONDS)
    """Mean wait before the second attempt; it doubles with each further one. To a server's ``Retry-After`` at most a second
    of it, on average, is added."""
    requests_per_minute: float | None = bounded(None, Number(0, 1e7, above=True, null=True))
    """Rate limit, attempts included; null for none."""
    max_concurrent: int = bounded(32, count(1, 4096))
    """Maximum number of requests in flight."""
    token_budget: int | None = bounded(None, count(1, 10**15, null=True))
    """Tokens, prompts included, after which no request is sent and the run ends; null for no limit."""
    log_probs: bool = False
    """Ask for log-probs, which become part of the recorded turns."""
    token_ids: bool = False
    """Ask for token ids (vLLM's ``return_token_ids``), which become part of the recorded turns."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request's body; null removes one that is sent by default."""


RESUMABLE = tuple(option.name for option in fields(Endpoint) if option.name not in ("model", "extra_body"))
"""Fields that a resumed run may change: where the server is and how it is asked, not what answers."""


def endpoint_node(config: Any, policy: str) -> Any:
    """A policy's own ``endpoint`` group as it is written, or None."""
    own = config.policies.get(policy)
    return own.get("endpoint") if isinstance(own, Mapping | DictConfig) else None  # a rule refuses what is no group


def has_endpoint(config: Any, policy: str) -> bool:
    return endpoint_node(config, policy) is not None


def endpoint_of(config: Any, policy: str) -> Endpoint:
    """A policy's endpoint with its defaults. The rules have checked its keys."""
    return cast(Endpoint, OmegaConf.to_object(typed_endpoint(endpoint_node(config, policy))))


def typed_endpoint(node: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(Endpoint), node)


def endpoint_policies(config: Any) -> list[str]:
    """Policies that a server elsewhere answers for, in the order of the agents."""
    return [name for name in all_policies(config.agents) if has_endpoint(config, name)]


def hosted_policies(config: Any) -> list[str]:
    """Policies whose models this run loads: all but those with an endpoint."""
    return [name for name in all_policies(config.agents) if not has_endpoint(config, name)]


def access_keys(plain: Mapping[str, Any]) -> set[str]:
    """Values of the environment variables that a plain configuration names as holders of access keys."""
    policies = plain.get("policies") or {}
    endpoints = [(policy or {}).get("endpoint") or {} for policy in policies.values()]
    names = [endpoint.get("api_key_env") for endpoint in endpoints if isinstance(endpoint, Mapping)]
    return {os.environ[name] for name in names if isinstance(name, str) and os.environ.get(name)}
