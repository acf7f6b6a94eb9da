"""Rules about policies that a server elsewhere answers for."""

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from urllib.parse import SplitResult, urlsplit

from omegaconf.errors import OmegaConfBaseException

from marl.config.endpoints import Endpoint, endpoint_node, typed_endpoint
from marl.config.errors import ConfigError, listing
from marl.config.policies import loops_of, policies_by_agent
from marl.utils.numbers import out_of_bounds
from marl.utils.registry import did_you_mean

KEYS = tuple(option.name for option in fields(Endpoint))
BESIDE = ("endpoint", "rollout", "thinking")
"""Keys of a policy that have an effect where an endpoint answers for it."""
SAMPLING = ("temperature", "top_p", "top_k", "response_length", "val_kwargs")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")


def endpoints(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Name, key and settings of every policy with an endpoint."""
    for name in config.policies:
        node = endpoint_node(config, name)
        if node is not None:
            yield name, f"policies.{name}.endpoint", node


def endpoint_keys_are_known(config: Any) -> None:
    """A value is not repeated: it may be an access key."""
    for _, group, node in endpoints(config):
        if not hasattr(node, "items"):
            raise ConfigError(f"{group}: expected a group of keys, as in {group}.base_url=<address>")
        for key in node:
            if key == "api_key":
                raise ConfigError(
                    f"{group}.api_key: a configuration is printed and saved, and holds no access key; remove it, put the key into "
                    f"an environment variable, and set {group}.api_key_env to the variable's name"
                )
            if key not in KEYS:
                raise ConfigError(
                    f"unknown key '{group}.{key}': it has no effect.{did_you_mean(str(key), KEYS)}{listing(KEYS)} Use one of "
                    "them, or remove it"
                )


def endpoint_values_are_valid(config: Any) -> None:
    for _, group, node in endpoints(config):
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


def endpoint_addresses_are_valid(config: Any) -> None:
    """An address with a user, a password or a query is not repeated: these are credentials."""
    for _, group, node in endpoints(config):
        url = str(node.get("base_url") or "")
        parts = address_of(url)
        if holds_more_than_an_address(url, parts):
            raise ConfigError(
                f"{group}.base_url holds a user, a password, a query or a fragment; expected scheme, host and path alone, as in "
                f"https://api.example.com/v1; set {group}.api_key_env for access"
            )
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{group}.base_url={url}: expected an address such as http://localhost:8000/v1; set it")
        if url.rstrip("/").endswith("/completions"):
            raise ConfigError(
                f"{group}.base_url={url}: expected the part before /chat/completions, which is added; use that alone"
            )


def address_of(url: str) -> SplitResult | None:
    """An address in its parts; None where it has no valid host or port."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return None
    return parts


def holds_more_than_an_address(url: str, parts: SplitResult | None) -> bool:
    if parts is None:
        return any(mark in url for mark in "@?#")
    return "@" in parts.netloc or bool(parts.query or parts.fragment)


def access_keys_are_set(config: Any) -> None:
    for _, group, node in endpoints(config):
        name = node.get("api_key_env")
        if name is None:
            continue
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{group}.api_key_env: expected the name of an environment variable in capitals, such as JUDGE_API_KEY, never "
                "the key itself; use such a variable"
            )
        if not os.environ.get(name, "").strip():
            raise ConfigError(
                f"{group}.api_key_env={name}: this variable is not set; export it where the run starts, or unset the key for a "
                "server that asks for none"
            )


def endpoints_are_not_trained(config: Any) -> None:
    for name, group, _ in endpoints(config):
        agents = [agent for agent, own in policies_by_agent(config.agents).items() if name in own]
        for agent in agents:
            if config.agents[agent].trainable:
                raise ConfigError(
                    f"{group}: agent {agent!r} acts with this policy and is trained, and there are no weights to train; set "
                    f"agents.{agent}.trainable=false, or remove the endpoint"
                )
        for agent, loop in loops_of(config, name).items():
            raise ConfigError(
                f"agents.{agent}.agent_loop={loop}: agent loops work on token ids, and {group} answers with text; unset it"
            )


def endpoints_have_no_model(config: Any) -> None:
    for name, group, _ in endpoints(config):
        settings = config.policies[name]
        others = [key for key in settings if key not in BESIDE]
        others += [f"rollout.{key}" for key in settings.get("rollout") or {} if key not in SAMPLING]
        if others:
            raise ConfigError(
                f"policies.{name}.{others[0]} has no effect beside {group}, whose server has a model and settings of its own; "
                f"remove it; expected sampling alone, policies.{name}.rollout.{{{','.join(SAMPLING)}}}"
            )


RULES = (
    endpoint_keys_are_known,
    endpoint_values_are_valid,
    endpoint_addresses_are_valid,
    access_keys_are_set,
    endpoints_are_not_trained,
    endpoints_have_no_model,
)
