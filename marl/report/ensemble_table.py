"""One table: every agent alone, their mean, the best of them, and each way to answer together."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl.utils.tables import aligned


@dataclass(frozen=True)
class Way:
    """One way to answer the tasks, and what came of it."""

    name: str
    correct_TS: Sequence[Sequence[float]] = ()
    """1 where the answer was right, by task and sample; nothing where this way is impossible."""
    tokens: float = 0
    """Sampled."""
    forward_tokens: float = 0
    """Read by a model, over all agents."""
    seconds: float = 0
    reason: str = ""
    """Reason why it is impossible."""


def mean_of_agents(agents: Sequence[Way]) -> Way:
    """Accuracy and cost of one agent drawn at random."""
    by_task = zip(*(agent.correct_TS for agent in agents), strict=True)
    return Way(
        "mean of agents",
        [[sum(sample) / len(agents) for sample in zip(*task, strict=True)] for task in by_task],
        sum(agent.tokens for agent in agents) / len(agents),
        sum(agent.forward_tokens for agent in agents) / len(agents),
        sum(agent.seconds for agent in agents) / len(agents),
    )


def best_agent(agents: Sequence[Way]) -> Way:
    """The agent with the highest accuracy on these very tasks: an optimistic choice. Of equals the first."""
    best = max(agents, key=lambda agent: mean_and_error(by_task(agent))[0])
    return Way(f"best ({best.name})", best.correct_TS, best.tokens, best.forward_tokens, best.seconds)


def by_task(way: Way) -> list[float]:
    return [sum(samples) / len(samples) for samples in way.correct_TS]


def mean_and_error(values_T: Sequence[float]) -> tuple[float, float | None]:
    """Mean m over tasks and its standard error sqrt(sum (x - m)^2 / (T - 1) / T): samples of one task are no new tasks."""
    count = len(values_T)
    mean = math.fsum(values_T) / count
    if count < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values_T) / (count - 1) / count)


def numbers(way: Way, single: Way) -> dict[str, Any]:
    """A row of the table. ``gain``: over a single agent, paired by task."""
    if way.reason:
        return {"name": way.name, "reason": way.reason}
    accuracy, error = mean_and_error(by_task(way))
    gain, gain_error = mean_and_error([a - b for a, b in zip(by_task(way), by_task(single), strict=True)])
    return {
        "name": way.name,
        "accuracy": accuracy,
        "standard_error": error,
        "gain": gain,
        "gain_error": gain_error,
        "tokens": way.tokens,
        "forward_tokens": way.forward_tokens,
        "seconds": round(way.seconds, 3),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table as text: a dash and the reason where a way is impossible."""
    cells = [("", "accuracy", "± s.e.", "over the mean", "± s.e.", "tokens", "forward tokens", "seconds")]
    for row in rows:
        if "reason" in row:
            cells.append((row["name"], *["-"] * 7))
            continue
        cells.append(
            (
                row["name"],
                f"{row['accuracy']:.3f}",
                shown(row["standard_error"]),
                f"{row['gain']:+.3f}",
                shown(row["gain_error"]),
                f"{row['tokens']:.0f}",
                f"{row['forward_tokens']:.0f}",
                f"{row['seconds']:.2f}",
            )
        )
    lines = aligned(cells)
    for index, row in enumerate(rows, start=1):
        lines[index] += f"  {row['reason']}" if "reason" in row else ""
    return "\n".join(lines)


def shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.3f}"


def write_json(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
