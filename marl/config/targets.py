"""Classes that a configuration may name: whatever stands at ``_target_`` is imported and called."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from marl.config.errors import ConfigError, line, plain
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


def built(section: DictConfig) -> Any:
    """The object of a section that names its class in ``_target_``, and those within it: what verl's ``omega_conf_to_dataclass``
    returns, in a fraction of the time, since every node is read once. ``_target_`` must have been checked (``check_targets``).

    Raises what the class raises, and ``MissingMandatoryValue`` for a value that was left as ``???``.
    """
    return _built(OmegaConf.to_container(section, resolve=True, throw_on_missing=True))


def _built(value: Any) -> Any:
    if isinstance(value, list):
        return [_built(item) for item in value]
    if not isinstance(value, dict):
        return value
    values = {key: _built(item) for key, item in value.items()}
    return get_class(values.pop("_target_"))(**values) if "_target_" in values else values


def targets_are_trusted(config: Any) -> None:
    """Raise ConfigError for a ``_target_`` of no trusted module, anywhere in the configuration."""
    given = config.trusted_targets
    if not all(isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in given):
        raise ConfigError(
            f"trusted_targets={given}: expected a list of packages or modules, as in trusted_targets=[my_package]"
        )
    for key, target in targets_in(plain(config)):
        check_target(key, target, trusted_modules(config))
