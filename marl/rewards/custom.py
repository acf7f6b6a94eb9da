"""A reward function of the user's, by the path of its file and its name."""

import copy
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from marl.config.errors import ConfigError
from marl.utils.own_frames import place_in_own
from marl.utils.registry import did_you_mean

PASSED = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Names of the arguments that a reward function is called with."""


@functools.cache
def module_of(path: str) -> ModuleType:
    """A file, loaded once a process, or a module (``pkg://a.b``).

    verl has a loader too; a process that imports it imports torch and Ray, five seconds each.
    """
    if path.startswith("pkg://"):
        return importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
    file = Path(path.removeprefix("file://")).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"marl_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"reward.custom_reward_function.path={path}: not a Python file; expected one that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path: str, name: str) -> Callable[..., Any]:
    """The function of that name in a file or module."""
    module = module_of(path)
    if not callable(getattr(module, name, None)):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"reward.custom_reward_function.name={name}: {path} defines no such function; known: {', '.join(known) or 'none'}."
            f"{did_you_mean(name, known)}"
        )
    return getattr(module, name)


@dataclass(frozen=True)
class Custom:
    """Location of a custom reward function, which is sent to other processes in place of the function itself."""

    path: str
    name: str
    kwargs: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        return load(self.path, self.name)

    def __call__(self, **arguments: Any) -> Any:
        return self.load()(**{**arguments, **self.kwargs})

    @property
    def is_async(self) -> bool:
        function = self.load()
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def checked_function(config: Any) -> None:
    """Raise ConfigError where the user's file cannot be loaded, has no such function, or one that cannot take what it is called
    with."""
    custom = custom_function(config)
    if custom is None:
        return
    try:
        function = custom.load()
    except ConfigError:
        raise
    except Exception as error:  # the user's file is run
        raise ConfigError(
            f"reward.custom_reward_function.path={custom.path}: {type(error).__name__}: {error}{place_in_own(error)}; expected a Python file with "
            f"a function {custom.name}(data_source, solution_str, ground_truth, extra_info)"
        ) from error
    try:
        expected = inspect.signature(function)
    except ValueError:  # written in C
        return
    try:
        expected.bind(**{**dict.fromkeys(PASSED), **custom.kwargs})
    except TypeError as error:
        own = f" and its reward_kwargs ({', '.join(custom.kwargs)})" if custom.kwargs else ""
        raise ConfigError(
            f"reward.custom_reward_function.name={custom.name}: it is called by name with {', '.join(PASSED)}{own}, and {custom.path} "
            f"defines {custom.name}{expected}: {error}; give it these parameters, or **kwargs"
        ) from None


def custom_function(config: Any) -> Custom | None:
    """The function named by ``reward.custom_reward_function``, or by verl's older ``custom_reward_function``."""
    if config.get("custom_reward_function") and config.custom_reward_function.path:
        from verl.experimental.reward_loop import migrate_legacy_reward_impl

        config = migrate_legacy_reward_impl(copy.deepcopy(config))
    node = config.reward.custom_reward_function
    if not node.path:
        return None
    # the older key's name has no default of its own
    return Custom(str(node.path), node.name or "compute_score", dict(node.get("reward_kwargs") or {}))
