"""``python -m marl.quickstart [--config-name game] [seed=3] [key=value …]``: make the tiny model, train the agents, show what
they learned."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marl.config.external import find_own_modules
from marl.utils.quiet import quiet, quiet_imports

if __name__ == "__main__":
    quiet_imports(sys.argv)
    find_own_modules()  # before verl imports them

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from marl import main as marl_main
from marl.config.overrides import hydra_overrides
from marl.quickstart import transcripts
from marl.report import summary
from marl.types import Metrics

console = Console()
CONFIGS = ("quickstart", "smollm2", "split_information", "game")
LINES = 10
"""Lines that a bar has where there is no terminal."""


class Bar:
    """A progress bar with a running text; plain lines where there is no terminal."""

    def __init__(self, title: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.title = title
        self.row: TaskID | None = None

    def __call__(self, done: int, total: int, text: str = "") -> None:
        if not console.is_terminal:
            if done % max(1, total // LINES) == 0:
                console.print(f"{self.title} {done}/{total} {text}".rstrip())
            return
        if self.row is None:
            self.progress.start()
            self.row = self.progress.add_task(self.title, total=total, text="")
        self.progress.update(self.row, completed=done, text=text)
        if done == total:
            self.progress.stop()


def show_step(bar: Bar) -> Callable[[int, int, Metrics], None]:
    """Show every step: the running accuracy by round over the last few steps."""
    recent: Metrics = {}

    def show(step: int, total: int, metrics: Metrics) -> None:
        shown = []
        for key in [key for key in metrics if key.startswith("team/accuracy/")] + ["team/vote"]:
            recent[key] = 0.8 * recent.get(key, metrics[key]) + 0.2 * metrics[key]
            shown.append(f"{key.rsplit('/', 1)[1].replace('_', ' ')} {recent[key]:.2f}")
        bar(step, total, "  ".join(shown))

    return show


def run(overrides: list[str], config_name: str = "quickstart") -> Any:
    with initialize_config_module("marl.configs", version_base="1.3"):
        config = compose(config_name, overrides=hydra_overrides(overrides))
    with quiet(bool(config.verbose)):
        return warm_up_and_train(config)


def warm_up_and_train(config: DictConfig) -> Any:
    from marl.quickstart.assets import RECIPES, ensure_for  # heavy, as what main imports

    warm = Bar("warming up the model")
    ensure_for(config, lambda done, of: warm(done, of), renew=True)
    where = "in this process" if config.resources.one_process else "in Ray"
    console.print(f"starting a worker and a server for each agent, {where} …")
    bar = Bar("training")
    try:
        trainer = marl_main.run(config, show_step(bar))
    finally:
        bar.progress.stop()  # always restores the cursor
    if trainer.history:
        console.print(summary.table(trainer.history, len(trainer.validation)))
    if RECIPES[config.task].pretrained:
        for table in transcripts.tables(Path(config.trainer.validation_data_dir)):
            console.print(table)
    found = summary.read_json(trainer.report_folder) if config.baseline else {}
    if found.get("baselines"):
        keys = ("problems", "baselines", "sampled_tokens", "degenerate_groups")
        console.print(summary.baseline_table(trainer.history, *(found[key] for key in keys)))
    console.print(f"curves: {trainer.report_folder / 'curves.png'}   numbers: {trainer.report_folder / 'summary.json'}")
    return trainer


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"
    parser = argparse.ArgumentParser(prog="python -m marl.quickstart", allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default="quickstart", choices=CONFIGS)
    options, overrides = parser.parse_known_args(arguments)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return marl_main.exit_code(lambda: run(overrides, options.config_name))


if __name__ == "__main__":
    sys.exit(main())
