"""Classes that a configuration may name: whatever stands at ``_target_`` is imported and called."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra.utils import get_class

from marl.config.errors import ConfigError, line
from marl.config.external import VARIABLE

TARGET = "_target_"
OURS = ("marl", "verl", "recipe")
"""Packages whose classes may be named without further ado."""


def targets_in(tree: Any, prefix: str = "", names: Collection[str] = (TARGET,)) -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` of a plain configuration, or every value under one of these ``names``, with its dotted key."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key in names:
                yield f"{prefix}{key}", value
            else:
                yield from targets_in(value, f"{prefix}{key}.", names)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from targets_in(value, f"{prefix}{number}.", names)


def trusted_modules(config: Any) -> tuple[str, ...]:
    """Ours, those that ``trusted_targets`` adds, and those that the user has verl import anyway."""
    return (*OURS, *(config.get("trusted_targets") or ()), *filter(None, os.environ.get(VARIABLE, "").split(",")))


def is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def check_target(key: str, target: Any, trusted: Sequence[str]) -> None:
    """Raise ConfigError for a target outside the trusted modules."""
    if not isinstance(target, str) or not is_within(target, trusted):
        raise ConfigError(
            f"{key}={target}: expected a class of {', '.join(dict.fromkeys(trusted))}; it would be imported and called: leave it "
            f"as it is, or add its package to trusted_targets, as in trusted_targets=[{str(target).partition('.')[0]}]"
        )


def check_class(key: str, target: Any, trusted: Sequence[str]) -> None:
    """Raise ConfigError for a target that is no class of a trusted module: a module also holds what it has imported,
    as in ``verl.utils.fs.os.system``."""
    check_target(key, target, trusted)
    try:
        kind = get_class(target)
    except Exception as error:  # a user's module, imported
        raise ConfigError(f"{key}={target}: {line(error)}; expected the dotted name of a class") from None
    check_target(key, f"{kind.__module__}.{kind.__qualname__}", trusted)
