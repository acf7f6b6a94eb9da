"""Live screen of a run: agents and rounds, rewards, credit, KL, phases and the last transcript."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from marl.report.progress import Display, Pace, line
from marl.types import Metrics

MAX_SHARE = 0.01
"""Largest share of a run's time that drawing may take; steps beyond it are not drawn."""
TURNS, WIDTH = 6, 300
"""Turns of a transcript that are shown, the last ones, and letters of each, the first ones."""
COLUMNS = {
    "score": ("score",),
    "credit share": ("credit_share",),
    "KL": ("kl_loss", "reward_kl_penalty", "ppo_kl"),
    "entropy": ("entropy",),
    "tokens": ("response_length",),
    "loss": ("loss",),
}
"""Columns of the agents' table, each with the metrics that it may show, the first that there is."""


class LiveScreen(Display):
    """Redraws itself after a step, as long as drawing takes at most ``MAX_SHARE`` of the time since the first."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.live = Live(console=console, auto_refresh=False)
        self.pace, self.clock = Pace(), clock
        self.dumps: list[Path] = []
        self.began, self.spent = clock(), 0.0

    def begin(self, config: Any) -> None:
        folders = (config.trainer.rollout_data_dir, config.trainer.validation_data_dir)
        self.dumps = [Path(folder) for folder in folders if folder]
        self.began = self.clock()
        self.live.start()

    def __call__(self, step: int, total: int, metrics: Metrics) -> None:
        left, started = self.pace.left(step, total, metrics), self.clock()
        if step < total and self.spent > MAX_SHARE * (started - self.began):
            return
        self.live.update(screen(step, total, metrics, left, last_transcript(self.dumps)), refresh=True)
        self.spent += self.clock() - started

    def end(self) -> None:
        self.live.stop()  # restores the cursor, too


def screen(step: int, total: int, metrics: Metrics, left: float | None, transcript: list[tuple[str, str]]) -> Group:
    tables = Table.grid(padding=(0, 4))
    tables.add_row(agent_table(metrics), phase_table(metrics))
    bar = Table.grid(expand=True)  # a bar by itself does not end its line
    bar.add_row(ProgressBar(total, step))
    parts: list[Any] = [Text(line(step, total, metrics, left)), bar, tables]
    if transcript:
        said = [Text.assemble((f"{who}: ", "bold"), text) for who, text in transcript]
        parts.append(Panel(Group(*said), title="an episode of the last step that was written", title_align="left"))
    return Group(*parts)


def agent_table(metrics: Metrics) -> Table:
    """A row for every agent: its accuracy by round, then what ``COLUMNS`` names; a dash where a step has no such number."""
    agents = list(dict.fromkeys(key.split("/")[1] for key in metrics if key.startswith("agent/")))
    rounds = sorted({int(key.rsplit("_", 1)[1]) for key in metrics if key.startswith("team/accuracy/round_")})
    table = Table(box=None)
    table.add_column("agent")
    for name in (*(f"round {r}" for r in rounds), *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for agent in agents:
        own = [(f"accuracy/round_{r}",) for r in rounds] + list(COLUMNS.values())
        table.add_row(agent, *(first_of(metrics, agent, keys) for keys in own))
    return table


def first_of(metrics: Metrics, agent: str, keys: tuple[str, ...]) -> str:
    found = [metrics[f"agent/{agent}/{key}"] for key in keys if f"agent/{agent}/{key}" in metrics]
    return f"{found[0]:.3g}" if found else "-"


def phase_table(metrics: Metrics) -> Table:
    """The step's phases, the longest first."""
    phases = {key.removeprefix("timing_s/"): value for key, value in metrics.items() if key.startswith("timing_s/")}
    whole = phases.pop("step", None) or sum(phases.values()) or 1.0
    table = Table(box=None)
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        table.add_row(name.replace("_", " "), f"{seconds:.2f}", f"{seconds / whole:.0%}")
    return table


def last_transcript(folders: list[Path]) -> list[tuple[str, str]]:
    """Speakers and texts of the first episode in the newest dump; empty before there is one."""
    files = [file for folder in folders for file in folder.glob("*.jsonl")]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[:2]:
        turns = list(first_episode(file))
        if turns:
            return turns[-TURNS:]
    return []


def first_episode(file: Path) -> Iterator[tuple[str, str]]:
    """The turns on a dump's first lines, without predictions; a line that is still written ends them."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for index, text in enumerate(islice(lines, 64)):
            try:
                turn = json.loads(text)
            except ValueError:
                return
            if index and "episode" in turn:
                return
            if turn["agent"] is not None and turn.get("foresees") is None:
                yield f"{turn['agent']}, round {turn['round']} [{turn['score']:g}]", turn["output"][:WIDTH]
