"""Agent loops and tools by their names: verl's own, registered ones, and those that a file lists."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf
from verl.experimental.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.tool_registry import load_all_tools
from verl.utils.import_utils import resolve_config_path

from marl.config.errors import ConfigError
from marl.config.targets import check_target, targets_in
from marl.types import AgentId
from marl.utils.registry import did_you_mean

ROLLOUT = "actor_rollout_ref.rollout"


def check_loops(rollout: Any, loops: Mapping[AgentId, str], trusted: Sequence[str]) -> None:
    """Raise ConfigError for a loop that is not registered, or that cannot be loaded with its tools."""
    for agent, name in loops.items():
        find_loop(rollout, name, f"agents.{agent}.agent_loop", trusted)
    if not loops:
        return
    tools_of(rollout)
    parser, known = rollout.multi_turn.format, ToolParser._registry
    if parser not in known:
        raise ConfigError(
            f"{ROLLOUT}.multi_turn.format={parser}: no such tool parser; expected one of {', '.join(sorted(known))}."
            f"{did_you_mean(str(parser), known)}"
        )


def find_loop(rollout: Any, name: str, key: str, trusted: Sequence[str]) -> Any:
    """Hydra config of an agent loop, from verl's registry or ``agent_loop_config_path``, whose classes are of ``trusted``
    modules; those of the registry have been imported already."""
    listed = listed_loops(rollout.agent.agent_loop_config_path)
    known = dict(_agent_loop_registry) | listed
    if name not in known:
        raise ConfigError(
            f"{key}={name}: no such agent loop; expected one of {', '.join(sorted(known))}.{did_you_mean(name, known)} "
            "Register your own by verl's @register in a module that VERL_USE_EXTERNAL_MODULES names, or list it in "
            f"{ROLLOUT}.agent.agent_loop_config_path"
        )
    if name in listed:
        for inner, target in targets_in(OmegaConf.to_container(OmegaConf.create(listed[name]))):
            check_target(f"{ROLLOUT}.agent.agent_loop_config_path: {name}.{inner}", target, trusted)
    try:
        found = hydra.utils.get_class(known[name]["_target_"])
    except Exception as error:  # a user's module, imported
        raise ConfigError(
            f"{key}={name}: its class cannot be imported: {type(error).__name__}: {error}; expected _target_ to name one"
        ) from None
    if not issubclass(found, AgentLoopBase):
        raise ConfigError(
            f"{key}={name}: {found.__qualname__} is not an agent loop; expected a subclass of verl's AgentLoopBase"
        )
    return known[name]


def listed_loops(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    key = f"{ROLLOUT}.agent.agent_loop_config_path"
    try:
        entries: Any = OmegaConf.load(resolved(path))
        return {entry["name"]: entry for entry in entries}
    except Exception as error:  # YAML and OmegaConf raise what they like
        raise ConfigError(
            f"{key}={path}: cannot be read: {type(error).__name__}: {error}; expected a YAML list of loops, each with "
            "name and _target_"
        ) from None


def tools_of(rollout: Any) -> list[Any]:
    paths = (rollout.multi_turn.tool_config_path, rollout.multi_turn.function_tool_path)
    try:
        return load_tools(*paths)
    except Exception as error:  # tools are a user's code
        raise ConfigError(
            f"{ROLLOUT}.multi_turn.tool_config_path={paths[0]} and function_tool_path={paths[1]}: the tools cannot be loaded: "
            f"{type(error).__name__}: {error}; expected verl's YAML of tools, and a file of functions with @function_tool"
        ) from None


@functools.cache
def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """Once a process, as in verl: a tool may hold a connection."""
    return load_all_tools(*(path and resolved(path) for path in (tool_config_path, function_tool_path)))


def resolved(path: str) -> str:
    return resolve_config_path(str(Path(path).expanduser()))
