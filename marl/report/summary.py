"""Summary of a run for a reader: ``summary.json``, ``curves.png`` and a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from marl.report.conversation import TRANSITIONS
from marl.types import Metrics
from marl.utils.intervals import share

History = Mapping[int, Metrics]
"""Team metrics of each validation, by step."""


def accuracy(team: Metrics) -> dict[str, float]:
    rounds = {key.removeprefix("accuracy/"): value for key, value in team.items() if key.startswith("accuracy/")}
    return {**rounds, "vote": team["vote"]}


def summarise(
    history: History,
    *,
    problems: int,
    steps: int,
    seconds: float,
    seed: int,
    log_prob_gap_max: float,
    restarts: int = 0,
    sampled_tokens: int = 0,
    learner: Metrics | None = None,
    baselines: Mapping[str, Metrics] | None = None,
) -> dict[str, Any]:
    """The content of ``summary.json``; ``problems``: how many were validated on; ``learner``: :meth:`Learner.summary`."""
    first, last = history[min(history)], history[max(history)]
    return {
        "problems": problems,
        "steps": steps,
        "seconds": round(seconds, 2),
        "restarts": restarts,
        "seed": seed,
        "accuracy": {"before": accuracy(first), "after": accuracy(last)},
        "log_prob_gap_max": log_prob_gap_max,
        "sampled_tokens": sampled_tokens,
        "degenerate_groups": None,
        **(learner or {}),
        "baselines": dict(baselines or {}),
    }


def write_json(summary: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n")


def table(history: History, problems: int) -> Table:
    """The first and the last validation, which may be one: accuracies with their intervals over the problems, the four transitions
    of an answer, how often a right agent was swayed."""
    steps = sorted({min(history), max(history)})
    first, both = history[steps[0]], len(steps) == 2
    about = f"{problems} validation problem{'s' * (problems != 1)}, 95 % intervals"
    result = Table(title=f"before and after training ({about})" if both and not steps[0] else about)
    for heading in ("", *(f"step {step}" for step in steps), *["change"] * both):
        result.add_column(heading, justify="left" if not heading else "right")
    rows = {name.replace("_", " "): f"accuracy/{name}" for name in accuracy(first) if name != "vote"}
    rows["vote"] = "vote"
    accuracies = set(rows.values())
    if "gain" in first:
        rows["gain of the last round"] = "gain"
        rows |= {name.replace("_", " → "): f"transitions/{name}" for name in TRANSITIONS}
        rows["right, met another answer, took it over"] = "swayed"
    for label, key in rows.items():
        values = [history[step].get(key) for step in steps]
        before, after = values[0], values[-1]
        change = f"{after - before:+.3f}" if before is not None and after is not None else ""
        counted = problems if key in accuracies else None
        result.add_row(label, *(share(value, counted) for value in values), *[change] * both)
    return result


def show(history: History, problems: int, folder: Path, run: Path) -> None:
    """The last lines of a run on a terminal: the accuracies before and after training, and where the results are."""
    console = Console(highlight=False)
    if history and "vote" in history[min(history)]:
        console.print(table(history, problems))
    console.print(Text(f"results: {folder}   full report: marl report {run}"), soft_wrap=True)


def read_json(folder: Path) -> dict[str, Any]:
    """The summary in a folder; nothing where there is none."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def baseline_table(
    history: History,
    problems: int,
    baselines: Mapping[str, Metrics],
    sampled_tokens: int,
    degenerate_groups: float | None = None,
) -> Table:
    """The trained team beside its baselines, with intervals over the problems."""
    last = history[max(history)]
    result = Table(title=f"the team and its baselines ({problems} validation problems, 95 % intervals)")
    for heading in ("", "accuracy", "sampled tokens", "degenerate groups"):
        result.add_column(heading, justify="left" if not heading else "right")
    degenerate = share(degenerate_groups)
    result.add_row("team, last answers", share(last_accuracy(last), problems), str(sampled_tokens), degenerate)
    result.add_row("team, vote", share(last["vote"], problems), str(sampled_tokens), degenerate)
    for name, numbers in baselines.items():
        degenerate = share(numbers.get("degenerate_groups"))
        result.add_row(name, share(numbers["accuracy"], problems), str(int(numbers["sampled_tokens"])), degenerate)
    return result


def last_accuracy(team: Metrics) -> float:
    """Accuracy of the agents' last answers; of the team's where no turn is one. The last round covers only those who
    had not finished."""
    return team.get("accuracy/final", team["vote"])


def plot(history: History, path: Path) -> None:
    """Curves of the validations: accuracy by round and vote, and the transitions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = sorted(history)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharex=True)
    for name in accuracy(history[steps[0]]):
        key = name if name == "vote" else f"accuracy/{name}"
        style = "--" if name == "vote" else "-"
        axes[0].plot(steps, [history[step].get(key) for step in steps], style, marker=".", label=name.replace("_", " "))
    for name in TRANSITIONS:
        values = [history[step].get(f"transitions/{name}") for step in steps]
        if values[0] is not None:
            axes[1].plot(steps, values, marker=".", label=name.replace("_", " → "))
    axes[0].set(title="accuracy", xlabel="step", ylim=(0, 1))
    axes[1].set(title="answers, first round → last", xlabel="step", ylim=(0, 1))
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
