"""A comparison of runs as data, Markdown and curves: those that differ in their seed alone are one group."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marl.config.identity import leaves, may_differ
from marl.report.progress import tokens_per_second
from marl.report.runs import CHANGES, FINISHED, Run, evidence
from marl.utils.best import less_is_better
from marl.utils.manifest import replace_text
from marl.utils.tables import markdown_table

SEED = re.compile(r"seed-?\d+")
SCORES = ("val/team/vote", "val/team/accuracy/final", "val/team/score", "team/vote", "team/score")
"""Metrics of a comparison's table, where runs have them."""
FITS = ("/loss", "/preference_accuracy")
HIDDEN = re.compile(r"trainer\.(default_local_dir|.*_data_dir|experiment_name)|(.*\.)?seed|assets")
"""Keys that follow from others."""
MEASURED = re.compile(r".*total_training_steps|trainer\.total_epochs|data\.val_.*|.*val_kwargs\..*")
"""Keys that a resumed run may change, and that decide what its last numbers are."""
MOST = 40
"""Settings that are listed in Markdown; JSON has all."""
POINTS = 12
"""Steps of a curve's table."""
NO_METRICS = "No numbers yet: no validation and no step has ended, or `file` is not in `trainer.logger`."
Result = Mapping[str, Any]


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


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that runs, or a single one, can be compared by; the best first."""
    keys = metrics_of(runs)
    return {
        "runs": [described(run) for run in runs],
        "groups": [
            {
                "name": group.name,
                "runs": [str(run.folder) for run in group.runs],
                "left_out": [str(run.folder) for run in group.runs if run not in group.counted],
                "unfinished": sum(not run.finished for run in group.runs),
                "seeds": [run.seed for run in group.runs],
                "last": {key: spread(group.finals(key)) for key in keys},
                "curves": {key: {step: spread(values) for step, values in group.curve(key).items()} for key in keys},
                "seconds": spread([seconds for run in group.counted if (seconds := seconds_of(run))]),
                "tokens": spread([tokens for run in group.counted if (tokens := costs(run)["tokens"])]),
            }
            for group in best_first(groups(runs))
        ],
        "differences": differences(runs),
    }


def described(run: Run) -> dict[str, Any]:
    record = {key: run.record.get(key) for key in ("started", "finished", "resumed", "versions")}
    known = {"folder": str(run.folder), "seed": run.seed, "state": run.state}
    return {**known, **record, "costs": costs(run), **evidence(run)}


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """The metrics that runs are compared by: scores, and, of runs without them, such as method=sft and dpo, which play nothing,
    losses and preferences that hold. Those of held-out data come first, and of these the preferences, which losses of another form
    or beta have on the same scale."""
    scores = [key for key in SCORES if any(run.last(key) is not None for run in runs)]
    without = [run for run in runs if all(run.last(key) is None for key in SCORES)]
    fits = {key for run in without for numbers in run.steps.values() for key in numbers if key.endswith(FITS)}
    return scores + sorted(fits, key=lambda key: (not key.startswith("val/"), key.endswith("/loss"), key))


def best_first(found: Sequence[Group]) -> list[Group]:
    """Groups by the median of the first metric that they have; those of which no run has finished after them, and those without
    numbers last."""
    keys = metrics_of([run for group in found for run in group.runs])

    def place(group: Group) -> tuple[bool, int, float]:
        for index, key in enumerate(keys):
            if finals := group.finals(key):
                sign = 1 if less_is_better(key) else -1
                return not group.counted[0].finished, index, statistics.median(finals) * sign
        return True, len(keys), 0.0

    return sorted(found, key=place)


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, smallest and largest; None of nothing."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs with the same settings together, named by what differs between the groups."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(repr(sorted(settings(run).items(), key=lambda item: item[0])), []).append(run)
    found = list(members.values())
    names = naming(differences([group[0] for group in found]))
    return [Group(name_of(group[0], index, names), tuple(group)) for index, group in enumerate(found)]


def settings(run: Run) -> dict[str, Any]:
    """The settings that change what is learned or measured, but for the seed, and for its number in a path."""
    return {
        key: without_seed(value)
        for key, value in leaves(run.config)
        if MEASURED.fullmatch(key) or (not may_differ(key, ()) and not HIDDEN.fullmatch(key))
    }


def without_seed(value: Any) -> Any:
    if isinstance(value, list):
        return [without_seed(part) for part in value]
    return SEED.sub("seed*", value) if isinstance(value, str) else value


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, and each run's value."""
    flat = [settings(run) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def naming(different: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The keys that name groups: the options that differ, and as many others as tell the groups apart."""
    names = {key: values for key, values in different.items() if key.endswith(".name")}
    for key, values in different.items():
        told_apart = distinct(names.values())
        if names and told_apart == len(values):
            break
        if distinct([*names.values(), values]) > told_apart:
            names[key] = values
    return names


def distinct(columns: Iterable[Sequence[Any]]) -> int:
    """Number of different rows."""
    return len({repr(row) for row in zip(*columns, strict=True)})


def name_of(run: Run, index: int, names: Mapping[str, list[Any]]) -> str:
    """The values of the keys that name groups, or else the experiment."""
    parts = [f"{key.removesuffix('.name')}={values[index]}" for key, values in names.items()]
    return " ".join(parts) or str(run.config["trainer"].get("experiment_name"))


def costs(run: Run) -> dict[str, Any]:
    """Seconds of the run, as its summary has them; those of its steps, by phase; and generated tokens: the summary's, or a sum
    over the steps of an unfinished run."""
    phases = {key for numbers in run.steps.values() for key in numbers if key.startswith("timing_s/")}
    tokens = [(tokens_per_second(numbers) or 0.0) * numbers.get("timing_s/step", 0.0) for numbers in run.steps.values()]
    return {
        "steps": max(run.steps, default=0),
        "seconds": run.summary.get("seconds"),
        "seconds_in_steps": round(run.total("timing_s/step"), 3),
        "seconds_by_phase": {key.removeprefix("timing_s/"): round(run.total(key), 3) for key in sorted(phases)},
        "tokens": run.summary.get("sampled_tokens") or round(sum(tokens)),
    }


def seconds_of(run: Run) -> float:
    """Seconds of the whole run, or of the steps so far of one that has no summary yet."""
    return float(run.summary.get("seconds") or run.total("timing_s/step"))


def markdown(result: Result, title: str) -> str:
    parts = [
        f"# {title}",
        *unfinished(result),
        *repeated(result),
        scores_table(result),
        *curve_tables(result),
        settings_table(result),
        costs_table(result),
    ]
    for run in result["runs"]:
        parts += turn_tables(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def unfinished(result: Result) -> list[str]:
    """A sentence for each run that has not finished: medians and curves leave it out where others of its group have."""
    left = [folder for group in result["groups"] for folder in group["left_out"]]
    return [
        f"`{run['folder']}`: {run['state']}{'; left out of medians and curves' if run['folder'] in left else ''}."
        for run in result["runs"]
        if run["state"] != FINISHED
    ]


def repeated(result: Result) -> list[str]:
    """A sentence for each seed of which a group has several runs: it weighs that much more than the others."""
    return [
        f"`{group['name']}` has {times} runs of seed {seed}, which weighs that much more in its medians; leave out all but one."
        for group in result["groups"]
        for seed, times in Counter(group["seeds"]).items()
        if times > 1
    ]


def scores_table(result: Result) -> str:
    """The groups, the best first."""
    keys = list(result["groups"][0]["last"])
    if not keys:
        return NO_METRICS
    rows = [
        [
            group["name"],
            f"{len(group['runs'])}" + (f" ({left} not finished)" if (left := group["unfinished"]) else ""),
            *(cell(group["last"][key]) for key in keys),
            cell(group["seconds"], 1),
            cell(group["tokens"], 0),
        ]
        for group in result["groups"]
    ]
    head = ["", "runs", *(f"`{key}`" for key in keys), "seconds", "tokens"]
    return f"## Last values: median [smallest, largest] over seeds, best first\n\n{markdown_table(head, rows)}"


def curve_tables(result: Result) -> list[str]:
    """The first metric of the table that each group has, over the steps."""
    curves = [[key for key, curve in group["curves"].items() if curve] for group in result["groups"]]
    keys = dict.fromkeys(having[0] for having in curves if having)
    return [f"## `{key}` by step\n\n{curve_table(result, key)}" for key in keys]


def curve_table(result: Result, key: str) -> str:
    steps = sorted({step for group in result["groups"] for step in group["curves"][key]})
    steps = [step for index, step in enumerate(steps) if index % (1 + len(steps) // POINTS) == 0 or step == steps[-1]]
    having = [group for group in result["groups"] if group["curves"][key]]
    rows = [[group["name"], *(cell(group["curves"][key].get(step)) for step in steps)] for group in having]
    return markdown_table(["step", *map(str, steps)], rows)


def settings_table(result: Result) -> str:
    different = result["differences"]
    if not different:
        return "## Settings\n\nNone differ but the seed." if len(result["runs"]) > 1 else ""
    head = ["", *(f"run {index}" for index in range(1, len(result["runs"]) + 1))]
    rows = [[f"`{key}`", *(short(value) for value in values)] for key, values in list(different.items())[:MOST]]
    more = f"\n\nand {len(different) - MOST} more." if len(different) > MOST else ""
    return f"## Settings that differ\n\n{markdown_table(head, rows)}{more}"


def costs_table(result: Result) -> str:
    rows = []
    for index, run in enumerate(result["runs"], start=1):
        cost = run["costs"]
        spent = [number(cost["seconds"], 1), f"{cost['seconds_in_steps']:.1f}", f"{cost['tokens']:,}"]
        known = [f"`{run['folder']}`", str(run["seed"]), run["state"], str(cost["steps"])]
        rows.append([str(index), *known, *spent, longest(cost["seconds_by_phase"])])
    head = ["run", "folder", "seed", "state", "steps", "seconds", "seconds in steps", "tokens", "longest phases"]
    return f"## Runs and costs\n\n{markdown_table(head, rows)}"


def longest(seconds: Mapping[str, float]) -> str:
    phases = sorted(((name, value) for name, value in seconds.items() if name != "step"), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.1f}" for name, value in phases[:3])


def turn_tables(run: Result) -> list[str]:
    parts = []
    if run["transitions"]:
        rows = [
            [rounds, *(f"{shares[change]:.3f}" for change in CHANGES), str(shares["answers"])]
            for rounds, shares in run["transitions"].items()
        ]
        head = ["rounds", *CHANGES, "answers"]
        parts.append(f"## Answers from round to round: `{run['folder']}`\n\n{markdown_table(head, rows)}")
    if run["credit"]:
        columns = list(next(iter(run["credit"].values())))
        rows = [[turn, *(number(means[key]) for key in columns)] for turn, means in run["credit"].items()]
        parts.append(f"## Credit by agent and round: `{run['folder']}`\n\n{markdown_table(['', *columns], rows)}")
    return parts


def cell(values: Result | None, digits: int = 3) -> str:
    if values is None:
        return "-"
    range_ = f" [{values['min']:.{digits}f}, {values['max']:.{digits}f}]" if values["runs"] > 1 else ""
    return f"{values['median']:.{digits}f}{range_}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def write(result: Result, text: str, folder: Path, name: str) -> list[Path]:
    """Write Markdown, JSON, and curves where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    for path, content in zip(paths, (text, json.dumps(result, indent=1, ensure_ascii=False) + "\n"), strict=True):
        replace_text(path, content)
    if find_spec("matplotlib") and any(any(group["curves"].values()) for group in result["groups"]):
        paths.append(folder / f"{name}.png")
        plot(result, paths[-1])
    return paths


def plot(result: Result, path: Path) -> None:
    """A panel for each metric: the median of a group's runs, and between which values they lie."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = [key for key in result["groups"][0]["last"] if any(group["curves"][key] for group in result["groups"])]
    figure, axes = pyplot.subplots(1, len(keys), figsize=(5.5 * len(keys), 4), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for group in result["groups"]:
            steps, values = list(group["curves"][key]), list(group["curves"][key].values())
            (line,) = axis.plot(steps, [value["median"] for value in values], marker=".", label=group["name"])
            low, high = [value["min"] for value in values], [value["max"] for value in values]
            axis.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        axis.set(title=key, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
