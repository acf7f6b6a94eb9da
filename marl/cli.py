"""The ``marl`` command: maps each subcommand to the module whose ``main`` it calls."""

import sys
from dataclasses import dataclass
from importlib import import_module

from marl.config.external import find_own_modules
from marl.config.short_help import show_help
from marl.utils.quiet import quiet_imports


@dataclass(frozen=True)
class Command:
    module: str
    """Imported only when the command is run; its ``main`` takes the arguments after the word and returns the exit code."""
    help: str


COMMANDS = {
    "train": Command("marl.main", "train: takes the arguments of python -m marl.main"),
    "quickstart": Command("marl.quickstart.__main__", "train the two tiny agents on this machine"),
    "run-one": Command(
        "marl.commands.run_one",
        "play one conversation and print it: takes the keys of train, and question= answers= model= dump= …",
    ),
    "plan": Command(
        "marl.commands.plan",
        "print a run's memory and placement without starting it: --cluster 2x8x80GB, and the keys of train",
    ),
    "eval": Command(
        "marl.commands.evaluate", "measure trained teams on the same tasks: RUN|CHECKPOINT|MODEL … task=FILE n=4"
    ),
    "chat": Command("marl.commands.chat", "ask a trained team from the terminal and read its debate: RUN"),
    "serve": Command(
        "marl.commands.serve", "put a trained team behind one OpenAI-compatible endpoint: RUN --port 8000"
    ),
    "ensemble": Command("marl.commands.ensemble", "compare the agents' vote and joint answers with each agent alone"),
}


def main() -> int:
    word, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if word not in COMMANDS:
        lines = [f"  marl {known:<12} {command.help}" for known, command in COMMANDS.items()]
        sys.stderr.write("\n".join(["usage: marl COMMAND [key=value …]", *lines, ""]))
        return 0 if word in ("-h", "--help") else 2
    if word == "train":
        show_help(rest)
    sys.argv = [f"marl {word}", *rest]
    quiet_imports(rest)
    find_own_modules()
    code: int = import_module(COMMANDS[word].module).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
