"""``policies.<name>.endpoint``: a policy that an OpenAI-compatible server answers for. Pure.

Its agents are never trained: there is no model, no worker and no weight sync behind it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from marl.config.errors import ConfigError, listing
from marl.config.policies import endpoint_node, loops_of, policies_by_agent
from marl.utils.near import did_you_mean
from marl.utils.numbers import SECONDS, Number, bounded, count, out_of_bounds


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


def endpoint_of(config: Any, policy: str) -> Endpoint:
    """A policy's endpoint with its defaults. The rules have checked its keys."""
    return cast(Endpoint, OmegaConf.to_object(typed_endpoint(endpoint_node(config, policy))))


def typed_endpoint(node: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(Endpoint), node)


def access_keys(plain: Mapping[str, Any]) -> set[str]:
    """Values of the environment variables that a plain configuration names as holders of access keys."""
    policies = plain.get("policies") or {}
    endpoints = [(policy or {}).get("endpoint") or {} for policy in policies.values()]
    names = [endpoint.get("api_key_env") for endpoint in endpoints if isinstance(endpoint, Mapping)]
    return {os.environ[name] for name in names if isinstance(name, str) and os.environ.get(name)}


BESIDE = ("endpoint", "rollout", "thinking")
"""Keys of a policy that have an effect where an endpoint answers for it."""
SAMPLING = ("temperature", "top_p", "top_k", "response_length", "val_kwargs")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")


def endpoints_are_valid(config: Any) -> None:
    """Raise ConfigError for an endpoint that cannot be asked, or whose policy has what only a model of this run could have."""
    for name in config.policies:
        node, group = endpoint_node(config, name), f"policies.{name}.endpoint"
        if node is not None:
            check_fields(node, group)
            check_address(str(node.get("base_url") or ""), group)
            check_access(node.get("api_key_env"), group)
            must_not_be_trained(config, name, group)
            must_have_no_model(config.policies[name], name)


def check_fields(node: Any, group: str) -> None:
    """A value is not repeated: it may be an access key."""
    if not hasattr(node, "items"):
        raise ConfigError(f"{group}: expected a group of keys, as in {group}.base_url=<address>")
    known = [option.name for option in fields(Endpoint)]
    for key in node:
        if key == "api_key":
            raise ConfigError(
                f"{group}.api_key: a configuration is printed and saved, and holds no access key; remove it, put the key into "
                f"an environment variable, and set {group}.api_key_env to the variable's name"
            )
        if key not in known:
            raise ConfigError(
                f"unknown key '{group}.{key}': it has no effect.{did_you_mean(str(key), known)}{listing(known)} Use one of them, or remove it"
            )
    try:
        typed = typed_endpoint(node)
    except OmegaConfBaseException as error:
        key, kind = str(error.full_key or ""), getattr(error.ref_type, "__name__", error.ref_type)
        raise ConfigError(
            f"{group}.{key}: the value has another type than this key's, {kind}; expected a value like the default's in "
            "docs/configuration.md"
        ) from None
    for message in out_of_bounds(typed, group):
        raise ConfigError(message)
    if not typed.model.strip():
        raise ConfigError(f"{group}.model={typed.model}: expected the model's name on the server; set it")


def check_address(url: str, group: str) -> None:
    """An address with a user, a password or a query is not repeated: these are credentials."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        parts = urlsplit("")
    if (
        "@" in parts.netloc
        or parts.query
        or parts.fragment
        or (not parts.netloc and any(mark in url for mark in "@?#"))
    ):
        raise ConfigError(
            f"{group}.base_url holds a user, a password, a query or a fragment; expected scheme, host and path alone, as in "
            f"https://api.example.com/v1; set {group}.api_key_env for access"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{group}.base_url={url}: expected an address such as http://localhost:8000/v1; set it")
    if url.rstrip("/").endswith("/completions"):
        raise ConfigError(
            f"{group}.base_url={url}: expected the part before /chat/completions, which is added; use that alone"
        )


def check_access(variable: Any, group: str) -> None:
    if variable is None:
        return
    if not isinstance(variable, str) or not VARIABLE.fullmatch(variable):
        raise ConfigError(
            f"{group}.api_key_env: expected the name of an environment variable in capitals, such as JUDGE_API_KEY, never "
            "the key itself; use such a variable"
        )
    if not os.environ.get(variable, "").strip():
        raise ConfigError(
            f"{group}.api_key_env={variable}: this variable is not set; export it where the run starts, or unset the key for a "
            "server that asks for none"
        )


def must_not_be_trained(config: Any, name: str, group: str) -> None:
    for agent, policies in policies_by_agent(config.agents).items():
        if name in policies and config.agents[agent].trainable:
            raise ConfigError(
                f"{group}: agent {agent!r} acts with this policy and is trained, and there are no weights to train; set "
                f"agents.{agent}.trainable=false, or remove the endpoint"
            )
    for agent, loop in loops_of(config, name).items():
        raise ConfigError(
            f"agents.{agent}.agent_loop={loop}: agent loops work on token ids, and {group} answers with text; unset it"
        )


def must_have_no_model(settings: Any, name: str) -> None:
    others = [key for key in settings if key not in BESIDE]
    others += [f"rollout.{key}" for key in settings.get("rollout") or {} if key not in SAMPLING]
    if others:
        raise ConfigError(
            f"policies.{name}.{others[0]} has no effect beside policies.{name}.endpoint, whose server has a model and settings of its "
            f"own; remove it; expected sampling alone, policies.{name}.rollout.{{{','.join(SAMPLING)}}}"
        )
