"""Runs that differ in their seed alone, as one: medians and spread, and what differs between the others. Pure."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl.comparison.runs import Run
from marl.config.identity import leaves, may_differ
from marl.report.progress import tokens_per_second
from marl.utils.best import less_is_better

SEED = re.compile(r"seed-?\d+")
SCORES = ("val/team/vote", "val/team/accuracy/final", "val/team/score", "team/vote", "team/score")
"""Metrics of a comparison's table, where runs have them."""
FITS = ("/loss", "/preference_accuracy")
HIDDEN = re.compile(r"trainer\.(default_local_dir|.*_data_dir|experiment_name)|(.*\.)?seed|assets")
"""Keys that follow from others."""
MEASURED = re.compile(r".*total_training_steps|trainer\.total_epochs|data\.val_.*|.*val_kwargs\..*")
"""Keys that a resumed run may change, and that decide what its last numbers are."""


@dataclass(frozen=True)
class Group:
    name: str
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose numbers count: those that have finished, or all while none has."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    def finals(self, key: str) -> list[float]:
        return [value for run in self.counted if (value := run.last(key)) is not None]

    def curve(self, key: str) -> dict[int, list[float]]:
        """The values of all runs that count at each step that all of them have; runs that have not begun are left out."""
        curves = [curve for run in self.counted if (curve := run.curve(key))]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        return {step: [curve[step] for curve in curves] for step in steps}


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """The metrics that runs are compared by: scores, and what runs without them, such as method=sft and dpo, which play nothing,
    measure of their losses."""
    scores = [key for key in SCORES if any(run.last(key) is not None for run in runs)]
    return scores + fits([run for run in runs if all(run.last(key) is None for key in SCORES)])


def fits(runs: Sequence[Run]) -> list[str]:
    """Metrics of losses: those of held-out data first, and of these the preferences that hold, which losses of another form or
    beta have on the same scale."""
    known = {key for run in runs for numbers in run.steps.values() for key in numbers if key.endswith(FITS)}
    return sorted(known, key=lambda key: (not key.startswith("val/"), key.endswith("/loss"), key))


def best_first(found: Sequence[Group]) -> list[Group]:
    """Groups by the median of the first metric that they have; those of which no run has finished after them, and those without
    numbers last."""
    keys = metrics_of([run for group in found for run in group.runs])

    def place(group: Group) -> tuple[bool, int, float]:
        begun = not group.counted[0].finished
        for index, key in enumerate(keys):
            if finals := group.finals(key):
                return begun, index, statistics.median(finals) * (1 if less_is_better(key) else -1)
        return True, len(keys), 0.0

    return sorted(found, key=place)


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, smallest and largest; None of nothing."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def settings(run: Run) -> dict[str, Any]:
    """The settings that change what is learned or measured, but for the seed, and for its number in a path."""
    return {key: without_seed(value) for key, value in leaves(run.config) if counts(key)}


def counts(key: str) -> bool:
    """True for a key by which runs are told apart."""
    return bool(MEASURED.fullmatch(key)) or (not may_differ(key, ()) and not HIDDEN.fullmatch(key))


def without_seed(value: Any) -> Any:
    if isinstance(value, list):
        return [without_seed(part) for part in value]
    return SEED.sub("seed*", value) if isinstance(value, str) else value


def groups(runs: Sequence[Run], swept: Sequence[str] = ()) -> list[Group]:
    """Runs with the same settings, and the same values of ``swept`` keys, together; named by what differs between the groups."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        own = [sorted(settings(run).items(), key=lambda item: item[0]), [value_of(run, key) for key in swept]]
        members.setdefault(repr(own), []).append(run)
    found = list(members.values())
    different = differences([group[0] for group in found])
    different |= {key: [value_of(group[0], key) for group in found] for key in swept}
    names = naming(different, swept)
    return [Group(name_of(group[0], index, names), tuple(group)) for index, group in enumerate(found)]


def value_of(run: Run, key: str) -> Any:
    """The value of a key of the command line: a setting, or the name of an option, as of ``learner``, by which the sweep named
    the run's folder: several options may set up one class, and one such as ``+experiment`` leaves no key of its own."""
    found: Any = run.config
    for part in key.lstrip("+").split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping | None):
        return found
    named = dict(part.partition("=")[::2] for part in run.folder.name.split(","))
    return named.get(key.lstrip("+")) or (found and found.get("name", found))


def naming(different: Mapping[str, list[Any]], swept: Sequence[str]) -> dict[str, list[Any]]:
    """The keys that name groups: those of the sweep, or else the options that differ; and as many others as tell them apart."""
    names = {key: different[key] for key in swept or [key for key in different if key.endswith(".name")]}
    for key, values in different.items():
        told = len(set(zip(*map(texts, names.values()), strict=True)))
        if names and told == len(values):
            break
        if len(set(zip(*map(texts, [*names.values(), values]), strict=True))) > told:
            names[key] = values
    return names


def texts(values: Sequence[Any]) -> list[str]:
    return [repr(value) for value in values]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, and each run's value."""
    flat = [settings(run) for run in runs]
    keys = dict.fromkeys(key for own in flat for key in own)
    values = {key: [own.get(key) for own in flat] for key in keys}
    return {key: own for key, own in values.items() if any(value != own[0] for value in own)}


def name_of(run: Run, index: int, names: Mapping[str, list[Any]]) -> str:
    """The values of the keys that name groups, or else the experiment."""
    parts = [f"{key.removesuffix('.name')}={values[index]}" for key, values in names.items()]
    return " ".join(parts) or str(run.config["trainer"].get("experiment_name"))


def costs(run: Run) -> dict[str, Any]:
    """Seconds of the run, as its summary has them; those of its steps, by phase; and generated tokens: the summary's, or a sum
    over the steps of an unfinished run."""
    phases = {key for numbers in run.steps.values() for key in numbers if key.startswith("timing_s/")}
    tokens = [
        rate * numbers["timing_s/step"]
        for numbers in run.steps.values()
        if (rate := tokens_per_second(numbers)) is not None
    ]
    return {
        "steps": max(run.steps, default=0),
        "seconds": run.summary.get("seconds"),
        "seconds_in_steps": round(run.total("timing_s/step"), 3),
        "seconds_by_phase": {key.removeprefix("timing_s/"): round(run.total(key), 3) for key in sorted(phases)},
        "tokens": run.summary.get("sampled_tokens") or round(sum(tokens)),
    }
