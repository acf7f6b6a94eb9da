"""A comparison as data and as Markdown. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marl.comparison.groups import HIDDEN, best_first, costs, differences, groups, metrics_of, spread, value_of
from marl.comparison.runs import DONE, Run
from marl.comparison.turns import CHANGES, evidence

MOST = 40
"""Settings that are listed in Markdown; JSON has all."""
NO_METRICS = "No numbers yet: no validation and no step has ended, or `file` is not in `trainer.logger`."
POINTS = 12
"""Steps of a curve's table."""


def comparison(runs: Sequence[Run], swept: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that two or more runs, or one, can be compared by; the best first. ``swept``: keys that get a column each."""
    columns = [key for key in dict.fromkeys(swept) if not HIDDEN.fullmatch(key.lstrip("+"))]
    found = best_first(groups(runs, columns))
    keys = metrics_of(runs)
    rows = {repr([value_of(group.runs[0], key) for key in columns]) for group in found}
    return {
        "runs": [described(run) for run in runs],
        "swept": columns if len(rows) == len(found) else [],  # as of two sweeps of one key: their names tell them apart
        "groups": [
            {
                "name": group.name,
                "values": {key: value_of(group.runs[0], key) for key in columns},
                "runs": [str(run.folder) for run in group.runs],
                "left_out": [str(run.folder) for run in group.runs if run not in group.counted],
                "unfinished": sum(not run.finished for run in group.runs),
                "seeds": [run.seed for run in group.runs],
                "last": {key: spread(group.finals(key)) for key in keys},
                "curves": {key: {step: spread(values) for step, values in group.curve(key).items()} for key in keys},
                "seconds": spread([seconds for run in group.counted if (seconds := seconds_of(run))]),
                "tokens": spread([tokens for run in group.counted if (tokens := costs(run)["tokens"])]),
            }
            for group in found
        ],
        "differences": differences(runs),
    }


def seconds_of(run: Run) -> float:
    """Seconds of the whole run, or of the steps so far of one that has no summary yet."""
    own = costs(run)
    return float(own["seconds"] or own["seconds_in_steps"])


def described(run: Run) -> dict[str, Any]:
    record = {key: run.record.get(key) for key in ("started", "finished", "resumed", "versions")}
    return {"folder": str(run.folder), "seed": run.seed, "state": run.state, **record, "costs": costs(run)} | evidence(
        run
    )


def markdown(result: Mapping[str, Any], title: str) -> str:
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


def unfinished(result: Mapping[str, Any]) -> list[str]:
    """A sentence for each run that has not finished: medians and curves leave it out where others of its group have."""
    left = [folder for group in result["groups"] for folder in group["left_out"]]
    return [
        f"`{run['folder']}`: {run['state']}{'; left out of medians and curves' if run['folder'] in left else ''}."
        for run in result["runs"]
        if run["state"] != DONE
    ]


def repeated(result: Mapping[str, Any]) -> list[str]:
    """A sentence for each seed of which a group has several runs: it weighs that much more than the others."""
    return [
        f"`{group['name']}` has {times} runs of seed {seed}, which weighs that much more in its medians; leave out all but one."
        for group in result["groups"]
        for seed, times in Counter(group["seeds"]).items()
        if times > 1
    ]


def scores_table(result: Mapping[str, Any]) -> str:
    """The groups, the best first: swept keys in columns of their own, or else the groups' names."""
    first, swept = result["groups"][0], result["swept"]
    keys = list(first["last"])
    if not keys:
        return NO_METRICS
    rows = [
        [
            *([str(group["values"][key]) for key in swept] or [group["name"]]),
            runs_of(group),
            *(cell(group["last"][key]) for key in keys),
            cell(group["seconds"], 1),
            cell(group["tokens"], 0),
        ]
        for group in result["groups"]
    ]
    head = [*([f"`{key}`" for key in swept] or [""]), "runs", *(f"`{key}`" for key in keys), "seconds", "tokens"]
    return f"## Last values: median [smallest, largest] over seeds, best first\n\n{table(head, rows)}"


def runs_of(group: Mapping[str, Any]) -> str:
    left = group["unfinished"]
    return f"{len(group['runs'])}{f' ({left} not finished)' if left else ''}"


def curve_tables(result: Mapping[str, Any]) -> list[str]:
    """The first metric of the table that each group has, over the steps."""
    of_groups = [[key for key, curve in group["curves"].items() if curve] for group in result["groups"]]
    keys = dict.fromkeys(own[0] for own in of_groups if own)
    return [f"## `{key}` by step\n\n{curve_table(result, key)}" for key in keys]


def curve_table(result: Mapping[str, Any], key: str) -> str:
    steps = sorted({step for group in result["groups"] for step in group["curves"][key]})
    steps = [step for index, step in enumerate(steps) if index % (1 + len(steps) // POINTS) == 0 or step == steps[-1]]
    having = [group for group in result["groups"] if group["curves"][key]]
    rows = [[group["name"], *(cell(group["curves"][key].get(step)) for step in steps)] for group in having]
    return table(["step", *map(str, steps)], rows)


def settings_table(result: Mapping[str, Any]) -> str:
    different = result["differences"]
    if not different:
        return "## Settings\n\nNone differ but the seed." if len(result["runs"]) > 1 else ""
    head = ["", *(f"run {index}" for index in range(1, len(result["runs"]) + 1))]
    rows = [[f"`{key}`", *(short(value) for value in values)] for key, values in list(different.items())[:MOST]]
    more = f"\n\nand {len(different) - MOST} more." if len(different) > MOST else ""
    return f"## Settings that differ\n\n{table(head, rows)}{more}"


def costs_table(result: Mapping[str, Any]) -> str:
    rows = [
        [
            str(index), f"`{run['folder']}`", str(run["seed"]), run["state"], str(run["costs"]["steps"]),
            number(run["costs"]["seconds"], 1), f"{run['costs']['seconds_in_steps']:.1f}", f"{run['costs']['tokens']:,}", longest(run["costs"]["seconds_by_phase"]),
        ]
        for index, run in enumerate(result["runs"], start=1)
    ]  # fmt: skip
    head = ["run", "folder", "seed", "state", "steps", "seconds", "seconds in steps", "tokens", "longest phases"]
    return f"## Runs and costs\n\n{table(head, rows)}"


def longest(seconds: Mapping[str, float]) -> str:
    phases = sorted(((name, value) for name, value in seconds.items() if name != "step"), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.1f}" for name, value in phases[:3])


def turn_tables(run: Mapping[str, Any]) -> list[str]:
    parts = []
    if run["transitions"]:
        rows = [
            [rounds, *(f"{shares[change]:.3f}" for change in CHANGES), str(shares["answers"])]
            for rounds, shares in run["transitions"].items()
        ]
        parts.append(
            f"## Answers from round to round: `{run['folder']}`\n\n{table(['rounds', *CHANGES, 'answers'], rows)}"
        )
    if run["credit"]:
        columns = list(next(iter(run["credit"].values())))
        rows = [[turn, *(number(own[key]) for key in columns)] for turn, own in run["credit"].items()]
        parts.append(f"## Credit by agent and round: `{run['folder']}`\n\n{table(['', *columns], rows)}")
    return parts


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)


def escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def cell(found: Mapping[str, Any] | None, digits: int = 3) -> str:
    if found is None:
        return "-"
    inner = f" [{found['min']:.{digits}f}, {found['max']:.{digits}f}]" if found["runs"] > 1 else ""
    return f"{found['median']:.{digits}f}{inner}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
