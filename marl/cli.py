"""The ``marl`` command. Thin: a word, and what it stands for."""

import sys

from marl.config.external import find_own_modules
from marl.utils.quiet import quiet_imports

COMMANDS = {
    "train": "train: the arguments of python -m marl.main",
    "quickstart": "train the two tiny agents on this machine",
    "run-one": "play one conversation and print it: the keys of train, and question= answers= model= dump= …",
    "ensemble": "measure the agents' vote and joint answers beside each of them",
}


def main() -> int:
    word, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    sys.argv = [f"marl {word}", *rest]
    quiet_imports(rest)
    if word in COMMANDS:
        find_own_modules()
    if word == "train":
        from marl.main import main as train

        return train(rest)
    if word == "quickstart":
        from marl.quickstart.__main__ import main as quickstart

        return quickstart()
    if word == "run-one":
        from marl.commands.run_one import main as run_one

        return run_one(rest)
    if word == "ensemble":
        from marl.commands.ensemble import main as ensemble

        return ensemble(rest)
    lines = [f"  marl {command:<12} {text}" for command, text in COMMANDS.items()]
    sys.stderr.write("\n".join(["usage: marl COMMAND [key=value …]", *lines, ""]))
    return 0 if word in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
