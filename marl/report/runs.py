"""A run's folder as readers see it: settings, metrics, turns, and whether the run has ended."""

import fcntl
import json
import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.types import Metrics, Score
from marl.utils import plain_files
from marl.utils.folders import METRICS, STATE, whole_lines
from marl.utils.near import did_you_mean
from marl.utils.plain_files import NotPlain, opener

logger = logging.getLogger(__name__)

RUN, LOCK, FINISHED = "run.json", ".lock", "finished"
DEPTH = 4
"""Levels of folders in which runs are looked for."""
CHANGES = ("wrong → wrong", "wrong → right", "right → wrong", "right → right")
KEPT = ("task", "sample", "agent", "round", "answers", "kept", "score")
OPTIONAL = ("acc", "reward", "advantage")
"""Columns of a dump that are read; of the second ones, older dumps have no ``acc``, and validations none of training's."""
LAST_STEPS = 20
"""Steps over which credit is averaged."""
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    folder: Path
    record: dict[str, Any]
    """``run.json``."""
    steps: dict[int, Metrics]
    summary: dict[str, Any]
    state: str

    @property
    def config(self) -> dict[str, Any]:
        return self.record["config"]

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    @property
    def finished(self) -> bool:
        return self.state == FINISHED

    def last(self, key: str) -> float | None:
        """The metric's value at the last step that has it."""
        return next(reversed(self.curve(key).values()), None)

    def total(self, key: str) -> float:
        return sum(numbers.get(key, 0.0) for numbers in self.steps.values())

    def curve(self, key: str) -> dict[int, float]:
        return {step: numbers[key] for step, numbers in sorted(self.steps.items()) if key in numbers}


def load_all(paths: Sequence[str]) -> list[Run]:
    """The runs in these folders, each once, in their order; a folder of runs stands for all of them."""
    folders = dict.fromkeys(folder.resolve() for path in paths for folder in find(Path(path).expanduser()))
    return [load(folder) for folder in folders]


def find(path: Path) -> list[Path]:
    """The folder itself if it is a run's, or the runs below it. Raises ConfigError where there is none."""
    if (path / RUN).is_file():
        return [path]
    if path.is_dir() and (found := sorted(below(path, DEPTH))):
        return found
    there = path if path.is_dir() else next(folder for folder in path.absolute().parents if folder.is_dir())
    names = sorted(entry.name for entry in there.iterdir() if entry.is_dir())
    reason = f"no run below it (no {RUN})" if path.is_dir() else "no such folder"
    listed = f" {there} has {', '.join(names[:10])}." if names else ""
    raise ConfigError(
        f"{path}: {reason}; expected a run's folder, such as outputs/quickstart/latest.{did_you_mean(path.name, names)}{listed}"
    )


def below(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders below this one. A checkpoint holds a copy of its run's record but is not a run."""
    for entry in folder.iterdir():
        if entry.is_symlink() or not entry.is_dir() or (entry / STATE).is_file():  # ``latest`` links to one of them
            continue
        if (entry / RUN).is_file():
            yield entry
        elif depth > 1:
            yield from below(entry, depth - 1)


def load(folder: Path) -> Run:
    """Raises ConfigError for a file that cannot be read."""
    must_be_plain(folder)
    record = read_record(folder / RUN)
    if not isinstance(record["config"].get("trainer"), dict):
        raise ConfigError(
            f"{folder / RUN}: no settings of a trainer; expected the file that a run of this version writes"
        )
    steps = read_metrics(folder / METRICS)
    return Run(folder, record, steps, read_summary(folder / "summary.json"), state_of(folder, record, steps))


def state_of(folder: Path, record: dict[str, Any], steps: dict[int, Metrics]) -> str:
    at = f"step {max(steps, default=0)} of {record['config']['trainer'].get('total_training_steps')}"
    if is_running(folder):
        return f"still being written, at {at}: its numbers will change"
    return FINISHED if FINISHED in record else f"ended before its last step, at {at}"


def must_be_plain(folder: Path) -> None:
    """Raise ConfigError for a link or a pipe among the files of a run."""
    try:
        plain_files.must_be_plain(folder)
    except NotPlain as error:
        raise ConfigError(str(error)) from None


def is_running(folder: Path) -> bool:
    """True if another process holds the folder, or, with a warning, if that cannot be known, as on a file system without locks."""
    try:
        with open(folder / LOCK, opener=opener) as file:
            # shared: a file that is open for reading may take no other lock on NFS
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        logger.warning(
            "%s did not finish, and is not continued: whether it is still running cannot be known here (%s); to continue it, set "
            "trainer.default_local_dir=%s",
            *(folder, error, folder),
        )
        return True
    return False


def read_record(path: Path) -> dict[str, Any]:
    """A ``run.json``. Raises ConfigError for one that cannot be read."""
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise ConfigError(f"{path}: no settings in it; expected the file that a run of this version writes")
    return record


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary; nothing where it has not ended. Raises ConfigError."""
    summary = read_json(path) if path.is_file() else {}
    if not isinstance(summary, dict):
        raise ConfigError(
            f"{path}: expected the object that a run writes; remove it, and costs are summed over the steps"
        )
    return summary


def read_json(path: Path) -> Any:
    """The content of a file that a run wrote. Raises ConfigError where it is not JSON."""
    try:
        with open(path, encoding="utf-8", opener=opener) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); expected the file that a run writes: restore it"
        ) from None


def read_metrics(path: Path) -> dict[int, Metrics]:
    """The numbers of every step; a last line that is still written is left out. Raises ConfigError for any other bad line."""
    steps: dict[int, Metrics] = {}
    for number, text in enumerate(whole_lines(path), start=1):
        try:
            line = json.loads(text)
            numbers = {key: value for key, value in line["data"].items() if isinstance(value, int | float)}
            steps.setdefault(int(line["step"]), {}).update(numbers)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; expected {{'step': …, 'data': {{…}}}}: remove the line, or restore the file"
            ) from None
    return steps


def dumps_of(run: Run, key: str) -> list[tuple[int, Path]]:
    """A run's dumps by step: in the folder that ``trainer.<key>`` names, or, where the run was moved since, in its own."""
    given = Path(str(run.config["trainer"].get(key) or ""))
    folder = given if given.is_dir() and given != Path() else run.folder / given.name
    files = [(int(file.stem), file) for file in folder.glob("*.jsonl") if file.stem.isdigit()] if given.name else []
    return sorted(files)


def turns_in(path: Path) -> Iterator[Line]:
    """The turns of a dump, without their texts; a last line that is still written is left out."""
    for number, text in enumerate(whole_lines(path), start=1):
        try:
            line = json.loads(text)
            if line["agent"] is not None:
                yield {key: line[key] for key in KEPT} | {key: line.get(key) for key in OPTIONAL}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error!r}; expected a turn, as a run of this version writes it"
            ) from None


def evidence(run: Run) -> dict[str, Any]:
    """A run's transitions at its last validation, and its credit over its last steps; empty where nothing was dumped."""
    validations, rollouts = dumps_of(run, "validation_data_dir"), dumps_of(run, "rollout_data_dir")[-LAST_STEPS:]
    return {
        "transitions": transitions(turns_in(validations[-1][1])) if validations else {},
        "credit": credit(turn for _, file in rollouts for turn in turns_in(file)),
    }


def transitions(turns: Iterable[Line]) -> dict[str, dict[str, float]]:
    """From each round in which an agent answers to its next: the shares of the four changes, and their number."""
    answers: dict[tuple[Any, ...], list[tuple[int, bool]]] = defaultdict(list)
    for turn in turns:
        if turn["answers"] and turn["kept"]:
            place = (turn["task"], turn["sample"], turn["agent"])
            answers[place].append((turn["round"], Score(turn["score"], None, acc=turn["acc"]).right))
    counts: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for given in answers.values():
        for (before, was), (after, now) in pairwise(sorted(given)):
            counts[before, after][f"{'right' if was else 'wrong'} → {'right' if now else 'wrong'}"] += 1
    return {
        f"{before} → {after}": {change: count[change] / count.total() for change in CHANGES}
        | {"answers": count.total()}
        for (before, after), count in sorted(counts.items())
    }


def credit(turns: Iterable[Line]) -> dict[str, dict[str, Any]]:
    """Means by agent and round of what turns were given, and of the size of their advantages."""
    by_place: dict[tuple[str, int], list[tuple[float | None, ...]]] = defaultdict(list)
    for turn in turns:
        given = turn["score"], turn["reward"], turn["advantage"]
        by_place[turn["agent"], turn["round"]].append(given)
    return {f"{agent}, round {r}": credit_of(given) for (agent, r), given in sorted(by_place.items())}


def credit_of(given: Sequence[tuple[float | None, ...]]) -> dict[str, Any]:
    scores, rewards, advantages = ([x for x in column if x is not None] for column in zip(*given, strict=True))
    means = {
        "score": scores,
        "reward": rewards,
        "advantage": advantages,
        "size of advantage": list(map(abs, advantages)),
    }
    return {"turns": len(given)} | {
        name: statistics.fmean(values) if values else None for name, values in means.items()
    }
