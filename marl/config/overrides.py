"""Command-line overrides."""

import json
import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from marl.config.errors import ConfigError

OPTIONS = ("agents", "runner", "method", "learner", "credit", "hardware")
VERL = "pkg://verl.trainer.config"
NEW_AGENT = re.compile(r"\+agents\.([^.=]+)(?:\.(.*)|=(\{.*\}))$", re.DOTALL)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""Names of agents, policies and pools: they become folders, actors, metrics and keys."""
POOLS = re.compile(r"^\+{0,2}resources\.pools(?:\.([^.=]+)(?:\.([^.=]+))?)?=(.*)$", re.DOTALL)


def hydra_overrides(words: Sequence[str]) -> list[str]:
    """The command line's words as Hydra takes them: new agents are typed, pools are added, and verl's configuration is found."""
    return find_verl(new_pools(new_agents(words)))


def new_agents(overrides: Sequence[str]) -> list[str]:
    """Let ``+agents.bob.role=…``, ``+agents.bob={}`` and ``+agents.bob={role: …}`` add a typed agent, where Hydra would add an untyped
    dict. Raises ConfigError for a name that Hydra could not read."""
    expanded: list[str] = []
    for override in overrides:
        match = NEW_AGENT.fullmatch(override)
        if match is None:
            expanded.append(override)
            continue
        name, setting, group = match.groups()
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{override}: {name!r} is not a valid name; expected up to 64 letters a-z, digits, _ and -"
            )
        option = f"+agent@agents.{name}=schema"
        if option not in expanded:
            expanded.append(option)
        if setting:
            expanded.append(f"agents.{name}.{setting}")
        for key, value in settings_of(override, group).items():
            expanded.append(f"agents.{name}.{key}={json.dumps(value, ensure_ascii=False)}")
    return expanded


def settings_of(override: str, group: str | None) -> dict[str, Any]:
    """Content of a group in braces, as Hydra reads it. Raises ConfigError where it cannot."""
    try:
        return OverridesParser.create().parse_override(f"group={group or '{}'}").value()  # type: ignore[return-value]
    except HydraException as error:
        raise ConfigError(
            f"{override}: cannot be read: {str(error).splitlines()[0]}; expected {{role: 'A text.'}}"
        ) from None


def new_pools(overrides: Sequence[str]) -> list[str]:
    """Let ``resources.pools={…}`` and ``resources.pools.big.gpus=4`` add pools, with a ``+`` before them or not: Hydra adds no
    typed entry to a dictionary by one of its keys."""

    def added(match: re.Match[str]) -> str:
        name, key, value = match.groups()
        if name is None:
            return f"++resources.pools={value}"
        return f"++resources.pools={{{name}:{value if key is None else f'{{{key}:{value}}}'}}}"

    return [POOLS.sub(added, override) for override in overrides]


def find_verl(overrides: Sequence[str]) -> list[str]:
    """Let every configuration, a user's too, build on verl's: Hydra takes a search path from the command line alone."""
    if any(override.startswith("hydra.searchpath=") for override in overrides):
        return [re.sub(r"^(hydra\.searchpath=\[)", rf"\1{VERL},", override) for override in overrides]
    # beside the other overrides: argparse takes them in one piece
    place = next((i for i, word in enumerate(overrides) if "=" in word and not word.startswith("-")), 0)
    return [*overrides[:place], f"hydra.searchpath=[{VERL}]", *overrides[place:]]
