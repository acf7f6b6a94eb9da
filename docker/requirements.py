"""Prints what pyproject.toml asks for, a line each: an image installs it before the code, whose changes then cost no download.

``python requirements.py [--only] [extra …]``; ``--only``: the extras alone.
"""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str], only: bool) -> list[str]:
    wanted = [] if only else list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


if __name__ == "__main__":
    words = sys.argv[1:]
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    sys.stdout.write(
        "\n".join(requirements(project, [word for word in words if word != "--only"], "--only" in words)) + "\n"
    )
