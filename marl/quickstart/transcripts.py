"""Conversations of a run's first and last validation, side by side."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

Line = dict[str, Any]
NUMBER = 5


def tables(validations: Path) -> Iterator[Table]:
    """A table for each of the first ``NUMBER`` tasks, of the dumps in a folder."""
    dumps = sorted(validations.glob("*.jsonl"), key=lambda path: int(path.stem))
    if not dumps:
        return
    before, after = (conversations(path) for path in (dumps[0], dumps[-1]))
    for task in list(before)[:NUMBER]:
        yield table(before[task], after[task], [int(path.stem) for path in (dumps[0], dumps[-1])])


def conversations(path: Path) -> dict[str, list[Line]]:
    """The turns of a dump by task."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {task: list(turns) for task, turns in groupby(lines, key=lambda line: str(line["task"]))}


def table(before: list[Line], after: list[Line], steps: list[int]) -> Table:
    """Prompts of an episode with the answers at either step. A cross marks a wrong answer."""
    result = Table(title=f"the answer is {before[0]['gts']}", title_justify="left")
    for heading in ("", "is shown", *(f"step {step} says" for step in steps)):
        result.add_column(heading)
    for one, other in zip(before, after, strict=False):
        shown = one["messages"][-1]["content"] if one["round"] == 1 else "what the other one said"
        said = [f"{line['output']} {'✓' if line['acc'] else '✗'}" for line in (one, other)]
        result.add_row(*map(Text, (f"{one['agent']}, round {one['round']}", shown, *said)))
    return result
