"""Short help: usage and option names, read from the sources so that it prints before any heavy import."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from marl.config.external import VARIABLE

PACKAGE = Path(__file__).parents[1]
GROUPS = ("agents", "runner", "method", "learner", "credit", "hardware")
REGISTERED = re.compile(
    r"""@register_(runner|learner|credit|method)\("(\w+)"\)|\.store\(group="(credit)", name="(\w+)\""""
)
TEXT = """\
usage: marl train [--quiet] [option=name …] [key=value …]      or: python -m marl.main …

options:
{options}

--quiet                         print no line for every step
-m seed=0,1,2                   one run for every value, one after another
--cfg job                       print all keys and their values without starting a run
--cfg job --package learner     one group of it
--config-name quickstart        start from another file of configs/; --config FILE: from one of yours
--output DIR, --resume RUN      the run's folder; a run, or a checkpoint of one, to continue
--hydra-help                    all other flags

docs/configuration.md explains the keys, docs/algorithms.md the learners and credits, docs/runners.md the runners.
"""


def takes_short_help(words: Sequence[str]) -> bool:
    """True if the command line asks for the help alone. With user modules, which may register options, or with further
    arguments, Hydra prints its own help."""
    return list(words) in (["--help"], ["-h"]) and not os.environ.get(VARIABLE)


def show_help(words: Sequence[str]) -> None:
    """Print the short help and end the process if the command line asks for that alone."""
    if takes_short_help(words):
        sys.stdout.write(help_text())
        sys.exit(0)


def help_text() -> str:
    return TEXT.format(
        options="\n".join(f"  {group:<10}{', '.join(sorted(option_names()[group]))}" for group in GROUPS)
    )


def option_names() -> dict[str, set[str]]:
    """Names of the options by group: the YAML files, and the classes that register themselves."""
    names = {group: {file.stem for file in (PACKAGE / "configs" / group).glob("*.yaml")} for group in GROUPS}
    names["agents"].add("schema")
    for package in ("learners", "methods", "runners"):
        for file in (PACKAGE / package).glob("*.py"):
            for first, name, second, other in REGISTERED.findall(file.read_text(encoding="utf-8")):
                names[first or second].add(name or other)
    return names
