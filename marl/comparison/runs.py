"""Runs as their folders hold them: settings, metrics, dumps, and whether they have ended."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from marl.config.errors import ConfigError
from marl.config.sweeps import is_swept
from marl.preflight.unfinished import FINISHED, RUN, is_running, read_json, read_record
from marl.types import Metrics
from marl.utils.folders import METRICS, STATE, whole_lines
from marl.utils.near import did_you_mean

SWEEP, DONE = "multirun.yaml", "finished"
DEPTH = 4
"""Levels of folders in which a sweep's runs are looked for."""


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
        return self.state == DONE

    def last(self, key: str) -> float | None:
        """The metric's value at the last step that has it."""
        found = [numbers[key] for _, numbers in sorted(self.steps.items()) if key in numbers]
        return found[-1] if found else None

    def total(self, key: str) -> float:
        return sum(numbers.get(key, 0.0) for numbers in self.steps.values())

    def curve(self, key: str) -> dict[int, float]:
        return {step: numbers[key] for step, numbers in sorted(self.steps.items()) if key in numbers}


def load_all(paths: Sequence[str]) -> list[Run]:
    """The runs in these folders, each once, in the order that was asked for; a folder of runs stands for all of them."""
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


def swept_keys(path: str) -> list[str]:
    """The keys that a sweep in this folder varies, as Hydra notes them; none of another folder."""
    noted = Path(path).expanduser() / SWEEP
    if not noted.is_file():
        return []
    try:
        words = yaml.load(noted.read_bytes(), yaml.CSafeLoader)["hydra"]["overrides"]["task"]
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{noted}: cannot be read ({error!r}); expected the file that Hydra writes: remove it"
        ) from None
    return [word.partition("=")[0] for word in words if is_swept(word)]


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
    return DONE if FINISHED in record else f"ended before its last step, at {at}"


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary; nothing where it has not ended. Raises ConfigError."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: expected the object that a run writes; remove it, and costs are summed over the steps"
        )
    return found


def read_metrics(path: Path) -> dict[int, Metrics]:
    """The numbers of every step; a last line that is still written is left out. Raises ConfigError for any other bad line."""
    steps: dict[int, Metrics] = {}
    for number, text in enumerate(whole_lines(path), start=1):
        try:
            line = json.loads(text, object_pairs_hook=once)
            numbers = {key: value for key, value in line["data"].items() if isinstance(value, int | float)}
            steps.setdefault(int(line["step"]), {}).update(numbers)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; expected {{'step': …, 'data': {{…}}}}: remove the line, or restore the file"
            ) from None
    return steps


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary of a JSON object. Raises ValueError for two values of one name, of which JSON would keep the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"two metrics are called {key!r}")
        found[key] = value
    return found
