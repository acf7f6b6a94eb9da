"""Checks the reward functions on GSM8K's own solutions and on damaged ones, and measures how long they take.

    python examples/check_gsm8k_rewards.py ~/data/gsm8k/test.parquet

Every solution must score 1 and every damaged one 0; the exit code is 1 otherwise.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pyarrow.parquet

from marl.rewards import Builtin, Reward, extractor
from marl.rewards.custom import Custom
from marl.rewards.processes import Processes
from marl.rewards.reward import in_processes
from marl.types import Task

DAMAGED = 50


def last_line(text: str, line: str) -> str:
    return text.rpartition("####")[0] + line


CHANGED: list[Callable[[str, str], str]] = [
    lambda text, truth: last_line(text, f"#### {int(truth) + 1}"),
    lambda text, truth: last_line(text, f"#### {truth}7"),
    lambda text, truth: last_line(text, f"#### 1{truth.removeprefix('-')}"),
    lambda text, truth: last_line(text, f"#### {truth}.5"),
    lambda text, truth: f"{text}\n#### {int(truth) - 2}",
]
MISPLACED: list[Callable[[str, str], str]] = [
    lambda text, truth: last_line(text, "####"),
    lambda text, truth: last_line(text, ""),
    lambda text, truth: last_line(text, f"{truth} ####"),
    lambda text, truth: last_line(text, f"### {truth}"),
    lambda text, truth: last_line(text, f"The answer is {truth}"),
]
EARLY: list[Callable[[str, str], str]] = [
    lambda text, truth: f"#### {truth}\n" + "Wait, let me think about that once more. " * 10,
]
"""The flexible rule looks for a number wherever it stands, and the mathematical one for ``####`` anywhere."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """A custom reward function: this file is the path that names it."""
    return float(extractor(data_source)(solution_str) == ground_truth)


def task_of(row: Mapping[str, Any], source: str, rule: str) -> Task:
    truth, index = row["reward_model"]["ground_truth"], row["extra_info"]["index"]
    return Task(str(index), list(row["prompt"]), truth, source, extractor(source, rule), row["extra_info"])


def texts_of(rows: Sequence[Mapping[str, Any]], damages: Sequence[Callable[[str, str], str]]) -> list[str]:
    """The solutions; or ``DAMAGED`` of them, spread over the file, each with the next of the damages."""
    if not damages:
        return [row["extra_info"]["answer"] for row in rows]
    return [
        damages[index % len(damages)](row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        for index, row in enumerate(spread(rows))
    ]


def spread(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return rows[:: max(1, len(rows) // DAMAGED)][:DAMAGED]


def fractions(rows: Sequence[Mapping[str, Any]], more: int) -> list[str]:
    """The answers in another form, which only math-verify can tell to be equal; ``more`` makes them wrong."""
    return [f"\\boxed{{\\frac{{{2 * int(row['reward_model']['ground_truth']) + more}}}{{2}}}}" for row in rows]


async def scores(reward: Reward, tasks: Sequence[Task], texts: Sequence[str]) -> tuple[float, list[float]]:
    started = time.perf_counter()
    scores = await asyncio.gather(*(reward.judge(task, text) for task, text in zip(tasks, texts, strict=True)))
    return time.perf_counter() - started, [score.value for score in scores]


async def check(rows: Sequence[Mapping[str, Any]], processes: Processes) -> bool:
    custom = in_processes(processes, Custom(__file__, "compute_score", {}))
    few = spread(rows)
    misplaced = texts_of(rows, [*CHANGED, *MISPLACED])
    early = texts_of(rows, [*CHANGED, *MISPLACED, *EARLY])
    cases: list[tuple[str, Callable[..., float | Awaitable[Any]], str, str, list[str], list[str]]] = [
        ("strict", Builtin("strict"), "openai/gsm8k", "strict", texts_of(rows, []), early),
        ("flexible", Builtin("flexible"), "openai/gsm8k", "flexible", texts_of(rows, []), texts_of(rows, CHANGED)),
        ("in a process", custom, "openai/gsm8k", "strict", texts_of(rows, []), early),
        ("mathematics", Builtin(run=processes.run), "math", "strict", texts_of(rows, []), misplaced),
        ("math-verify", Builtin(run=processes.run), "math", "strict", fractions(rows, 0), fractions(few, 1)),
    ]
    await processes.run(dict, {})  # processes start with the first call
    good = True
    for name, function, source, rule, solutions, damaged in cases:
        reward = Reward(function)
        seconds, right = await scores(reward, [task_of(row, source, rule) for row in rows], solutions)
        _, wrong = await scores(reward, [task_of(row, source, rule) for row in few], damaged)
        good = good and sum(right) == len(right) and not any(wrong)
        print(
            f"{name:14} solutions {sum(right):g} of {len(right)}, damaged {sum(wrong):g} of {len(wrong)}, "
            f"{seconds:.3f} s ({1000 * seconds / len(right):.3f} ms each)"
        )
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a parquet file that examples/data_preprocess/gsm8k.py wrote")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    rows = pyarrow.parquet.read_table(args.file).to_pylist()
    processes = Processes(args.processes, timeout_s=30.0)
    try:
        return 0 if asyncio.run(check(rows, processes)) else 1
    finally:
        processes.stop()


if __name__ == "__main__":
    sys.exit(main())
