"""Classes that a configuration may name: whatever stands at ``_target_`` is imported and called. Pure."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from marl.config.errors import ConfigError
from marl.config.external import VARIABLE

TARGET = "_target_"
OURS = ("marl", "verl", "recipe")
"""Packages whose classes may be named without further ado."""


def targets_in(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` of a plain configuration, with its dotted key."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == TARGET:
                yield f"{prefix}{key}", value
            else:
                yield from targets_in(value, f"{prefix}{key}.")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from targets_in(value, f"{prefix}{number}.")


def trusted_modules(config: Any) -> tuple[str, ...]:
    """Ours, those that ``trusted_targets`` adds, and those that the user has verl import anyway."""
    return (*OURS, *config.trusted_targets, *filter(None, os.environ.get(VARIABLE, "").split(",")))


def is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def check_target(key: str, target: Any, trusted: Sequence[str]) -> None:
    """Raise ConfigError for a target outside the trusted modules."""
    if not isinstance(target, str) or not is_within(target, trusted):
        raise ConfigError(
            f"{key}={target}: expected a class of {', '.join(dict.fromkeys(trusted))}; it would be imported and called: leave it "
            f"as it is, or add its package to trusted_targets, as in trusted_targets=[{str(target).partition('.')[0]}]"
        )
