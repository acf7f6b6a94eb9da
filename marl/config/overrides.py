"""Command-line overrides."""

import re
from collections.abc import Sequence

VERL = "pkg://verl.trainer.config"
NEW_AGENT = re.compile(r"\+agents\.([^.=]+)(?:\.(.*)|=\{\})$")


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


def find_verl(overrides: Sequence[str]) -> list[str]:
    """Let every configuration, a user's too, build on verl's: Hydra takes a search path from the command line alone."""
    if any(override.startswith("hydra.searchpath=") for override in overrides):
        return [re.sub(r"^(hydra\.searchpath=\[)", rf"\1{VERL},", override) for override in overrides]
    # beside the other overrides: argparse takes them in one piece
    place = next((i for i, word in enumerate(overrides) if "=" in word and not word.startswith("-")), 0)
    return [*overrides[:place], f"hydra.searchpath=[{VERL}]", *overrides[place:]]
