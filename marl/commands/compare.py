"""``marl compare RUN RUN…``: medians over seeds, settings that differ, costs, transitions and credit."""

from pathlib import Path

import click

from marl.comparison import files, tables
from marl.comparison.runs import load_all, swept_keys


@click.command("compare")
@click.argument("runs", nargs=-1, required=True)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for comparison.md, .json and .png.")
def command(runs: tuple[str, ...], out: str | None) -> int:
    """Compare RUNS: folders of runs, or folders that hold runs. Those that differ in their seed alone are shown as one, by
    median, smallest and largest value."""
    result = tables.comparison(load_all(runs), [key for run in runs for key in swept_keys(run)])
    text = tables.markdown(result, "Comparison")
    click.echo(text)
    if out is not None:
        click.echo("\n".join(map(str, files.write(result, text, Path(out), "comparison"))))
    return 0
