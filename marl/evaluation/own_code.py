"""Settings of a saved run that execute code: a checkpoint of somebody else brings its own, and they hold only where the user names
them. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from marl.config.errors import ConfigError
from marl.config.identity import leaves

EXECUTES = re.compile(
    r"(.*\.)?(trust_remote_code|external_lib|trusted_targets|custom_reward_function\.path|custom_cls\.path|custom_backend_module"
    r"|custom_async_server\.path|tool_config_path|function_tool_path|reward_loop_module_path|module\.path|custom_sampler\.path"
    r"|checkpoint_callback_class|sampler\.class_path)"
)
"""Keys whose value is a file, a module or a permission."""
REWARD = re.compile(r"(reward\.)?custom_reward_function\.path")


def without_code(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings without those keys, so that each has its default."""
    kept = {key: value for key, value in tree.items() if not EXECUTES.fullmatch(f"{prefix}{key}")}
    return {
        key: without_code(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }


def left_out(saved: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Settings of the run that the command line does not name."""
    named = {word.partition("=")[0].lstrip("+") for word in words}
    found = {key: value for key, value in leaves(saved) if EXECUTES.fullmatch(key) and key not in named}
    return {key: value for key, value in found.items() if value not in (None, False, "", [], {})}


def must_be_scored_as_in_training(path: Any, saved: Mapping[str, Any], words: Iterable[str]) -> None:
    """Raise ConfigError where a run's reward is code that nobody has named: other rules would give other numbers."""
    for key, value in left_out(saved, words).items():
        if REWARD.fullmatch(key):
            raise ConfigError(
                f"{key}={value} of {path}: code of the run's, which is executed only where you name it; add {key}={value}, or "
                f"{key}=null for the rules of this package"
            )
