"""docs/tutorial.md as its tests read it: the files that it lists, its commands, and what it says that they print."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "tutorial.md"
MOST = 15
BEFORE = ("make install",)
"""Commands in the text, which need the network."""
FILE = re.compile(r"^`([\w.]+)`:\n\n```(?:python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
VARYING = {
    r"…": ".*",
    r"\d{8}-\d{6}-\w{4}-seed\d+": r"\d{8}-\d{6}-\w{4}-seed\d+",
    r"[-+]?\d[\d.,:]*": r"[-+]?[\d.,:]+",
    r"\s+": r"\s+",
}
"""Parts of a line that may differ between machines, and what they may be."""
PARTS = re.compile("|".join(f"({varying})" for varying in VARYING))


@dataclass(frozen=True)
class Shown:
    """A command of the document, and the lines that it is said to print."""

    command: str
    lines: tuple[str, ...]


def text() -> str:
    return DOCUMENT.read_text()


def files() -> dict[str, str]:
    return dict(FILE.findall(text()))


def commands() -> list[Shown]:
    found = COMMAND.findall(text())
    return [
        Shown(command.strip(), tuple(line for line in lines.splitlines() if line.strip())) for command, lines in found
    ]


def pattern_of(line: str) -> re.Pattern[str]:
    """A quoted line with numbers, stamps and digests left open; … stands for anything."""
    forms, found, at = list(VARYING.values()), "", 0
    for part in PARTS.finditer(line.strip()):
        found += re.escape(line.strip()[at : part.start()]) + forms[(part.lastindex or 1) - 1]
        at = part.end()
    return re.compile(found + re.escape(line.strip()[at:]))


def missing_lines(shown: Shown, printed: str) -> list[str]:
    """Quoted lines that were not printed, in this order."""
    left, missing = iter([line.strip() for line in printed.splitlines()]), []
    for line in shown.lines:
        if line.strip() == "…":
            continue
        if not any(pattern_of(line).fullmatch(found) for found in left):
            missing.append(line)
            left = iter([line.strip() for line in printed.splitlines()])
    return missing
