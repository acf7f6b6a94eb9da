"""Masking of secrets in what is saved, printed or shown to trackers."""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

SECRET = re.compile(
    r"(api_?key|access_?key|secret|passw(or)?d|credential|(auth|access|hf|hub|bearer)_?token|^token$)", re.I
)
MASKED = "***"


def masked(tree: Any, secret: bool = False, hidden: Collection[str] = ()) -> Any:
    """The same tree with the values of secret keys, of environment variables and of secret variables hidden, and ``hidden``
    wherever a text holds one of them."""
    if isinstance(tree, Mapping):
        return {
            key: masked(value, secret or key == "env_vars" or is_secret(key), hidden) for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [masked(value, secret, hidden) for value in tree]
    if not isinstance(tree, str):
        return MASKED if secret and tree is not None else tree
    spelt = any(tree == word or (len(word) >= 8 and word in tree) for word in hidden)
    return MASKED if secret or spelt or tree in secrets_of_environment() else tree


def is_secret(key: Any) -> bool:
    """True for keys that hold secrets; those that name a variable (``api_key_env``) hold none."""
    return isinstance(key, str) and not key.endswith("_env") and SECRET.search(key) is not None


def secrets_of_environment() -> set[str]:
    """Values that a key may have been given by ``${oc.env:…}``; short ones are words that mean other things."""
    return {value for key, value in os.environ.items() if len(value) >= 8 and (is_secret(key) or key.endswith("TOKEN"))}
