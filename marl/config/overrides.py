"""Command-line overrides."""

import re
from collections.abc import Sequence

from marl.config.errors import ConfigError

OPTIONS = ("agents", "runner", "method", "learner", "credit", "hardware")
VERL = "pkg://verl.trainer.config"
NEW_AGENT = re.compile(r"\+agents\.([^.=]+)(?:\.(.*)|=\{\})$", re.DOTALL)
POOLS = re.compile(r"^\+{0,2}resources\.pools(?:\.([^.=]+)(?:\.([^.=]+))?)?=(.*)$", re.DOTALL)


def hydra_overrides(words: Sequence[str]) -> list[str]:
    """The command line's words as Hydra takes them: new agents are typed, pools are added, and verl's configuration is found."""
    return find_verl(new_pools(new_agents(words)))


def options_are_words(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an option that is a number or nothing, which Hydra answers with a bare error."""
    for override in overrides:
        group, equals, value = override.partition("=")
        if equals and not group:
            raise ConfigError(f"{override}: there is no key; expected key=value")
        if equals and group in OPTIONS and not re.search(r"[A-Za-z]|\{\}", value):
            raise ConfigError(f"{override}: expected the name of an option, as in learner=grpo")


def new_agents(overrides: Sequence[str]) -> list[str]:
    """Let ``+agents.bob.role=…`` and ``+agents.bob={}`` add a typed agent, where Hydra would add an untyped dict."""
    expanded: list[str] = []
    for override in overrides:
        match = NEW_AGENT.fullmatch(override)
        if match is None:
            expanded.append(override)
            continue
        name, setting = match.groups()
        option = f"+agent@agents.{name}=schema"
        if option not in expanded:
            expanded.append(option)
        if setting:
            expanded.append(f"agents.{name}.{setting}")
    return expanded


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
