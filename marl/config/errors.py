"""One error for whatever is wrong with a configuration, and what it says."""

import re
from collections.abc import Iterable

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from marl.utils.registry import did_you_mean


class ConfigError(ValueError):
    """Names the key, its value, what was expected and how to mend it."""


def explain(error: Exception) -> str:
    """What is wrong, from what Hydra or OmegaConf raised: the key, the value, what was expected, the nearest known name."""
    if isinstance(error, MissingConfigException):
        return missing_option(error)
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ is not None else error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        known = [str(key) for key in cause.parent_node]
        parent = ".".join(str(cause.full_key).split(".")[:-1])
        where = f"'{parent}'" if parent else "the configuration"
        return f"unknown key '{cause.full_key}': {where} has no '{cause.key}'.{did_you_mean(str(cause.key), known)}{listing(known)}"
    if isinstance(cause, OmegaConfBaseException):
        text = str(cause.msg or cause).splitlines()[0]
        return f"wrong value for '{cause.full_key}': {text}"
    return str(error)


def missing_option(error: MissingConfigException) -> str:
    wanted = re.search(r"Could not find '([\w/]+)/(\w+)'", str(error))
    if wanted is None:
        return str(error)
    group, name = wanted.groups()
    known = list(error.options or [])
    return f"unknown option {group}={name}; known: {', '.join(known)}.{did_you_mean(name, known)}"


def listing(known: Iterable[str]) -> str:
    names = sorted(known)
    return f" Known: {', '.join(names)}." if 0 < len(names) <= 20 else ""
