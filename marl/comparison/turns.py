"""Turns of a run's dumps: which answers change from round to round, and each agent's credit. Pure but for the reading."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from marl.comparison.runs import Run
from marl.config.errors import ConfigError
from marl.types import Score
from marl.utils.folders import whole_lines

Line = Mapping[str, Any]
CHANGES = ("wrong → wrong", "wrong → right", "right → wrong", "right → right")
KEPT = ("task", "sample", "agent", "round", "answers", "kept", "score")
SOME = ("acc", "reward", "advantage")
"""Columns of a dump that are read; the second ones may be missing: older dumps have no ``acc``, validations none of training's."""
LAST_STEPS = 20
"""Steps over which credit is averaged."""


def dumped(run: Run, key: str) -> list[tuple[int, Path]]:
    """A run's dumps by step: in the folder that it names, or, where it was moved since, in its own."""
    given = Path(str(run.config["trainer"].get(key) or ""))
    folder = given if given.is_dir() and given != Path() else run.folder / given.name
    files = [(int(file.stem), file) for file in folder.glob("*.jsonl") if file.stem.isdigit()] if given.name else []
    return sorted(files)


def lines_of(path: Path) -> Iterator[Line]:
    """The turns of a dump, without their texts; a last line that is still written is left out."""
    for number, text in enumerate(whole_lines(path), start=1):
        try:
            line = json.loads(text)
            if line["agent"] is not None:
                yield {key: line[key] for key in KEPT} | {key: line.get(key) for key in SOME}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error!r}; expected a turn, as a run of this version writes it"
            ) from None


def transitions(lines: Iterable[Line]) -> dict[str, dict[str, float]]:
    """From each round in which an agent answers to its next: the shares of the four changes, and their number."""
    answers: dict[tuple[Any, ...], list[tuple[int, bool]]] = defaultdict(list)
    for line in lines:
        if line["answers"] and line["kept"]:
            place = (line["task"], line["sample"], line["agent"])
            answers[place].append((line["round"], Score(line["score"], None, acc=line["acc"]).right))
    counts: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for given in answers.values():
        for (before, was), (after, now) in pairwise(sorted(given)):
            counts[before, after][f"{'right' if was else 'wrong'} → {'right' if now else 'wrong'}"] += 1
    return {f"{before} → {after}": shares(count) for (before, after), count in sorted(counts.items())}


def shares(count: Counter[str]) -> dict[str, float]:
    total = sum(count.values())
    return {change: count[change] / total for change in CHANGES} | {"answers": total}


def credit(lines: Iterable[Line]) -> dict[str, dict[str, Any]]:
    """Means by agent and round of what turns were given, and of the size of their advantages."""
    found: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        found[line["agent"], line["round"]].append(line)
    return {f"{agent}, round {r}": credit_of(turns) for (agent, r), turns in sorted(found.items())}


def credit_of(turns: list[Line]) -> dict[str, Any]:
    sizes = [abs(turn["advantage"]) for turn in turns if turn.get("advantage") is not None]
    return {
        "turns": len(turns),
        "score": mean(turn["score"] for turn in turns),
        "reward": mean(turn.get("reward") for turn in turns),
        "advantage": mean(turn.get("advantage") for turn in turns),
        "size of advantage": mean(sizes),
    }


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def evidence(run: Run) -> dict[str, Any]:
    """A run's transitions at its last validation, and its credit over its last steps; empty where nothing was dumped."""
    validations, rollouts = dumped(run, "validation_data_dir"), dumped(run, "rollout_data_dir")[-LAST_STEPS:]
    trained = [line for _, file in rollouts for line in lines_of(file)]
    return {
        "transitions": transitions(lines_of(validations[-1][1])) if validations else {},
        "credit": credit(trained),
    }
