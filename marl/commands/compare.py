"""``marl compare RUN RUN…``: medians over seeds, settings that differ, costs, transitions and credit."""

from pathlib import Path

import click

from marl.report import comparison
from marl.report.runs import load_all


@click.command("compare")
@click.argument("runs", nargs=-1, required=True)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for comparison.md, .json and .png.")
def command(runs: tuple[str, ...], out: str | None) -> int:
    """Compare RUNS: folders of runs, or folders that hold runs. Those that differ in their seed alone are shown as one, by
    median, smallest and largest value."""
    result = comparison.comparison(load_all(runs))
    text = comparison.markdown(result, "Comparison")
    click.echo(text)
    if out is not None:
        click.echo("\n".join(map(str, comparison.write(result, text, Path(out), "comparison"))))
    return 0
