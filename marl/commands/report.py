"""``marl report RUN|SWEEP``: the report of a run, or of all runs below a folder, written beside them."""

from pathlib import Path

import click

from marl.report import comparison
from marl.report.runs import load_all, must_be_plain


@click.command("report")
@click.argument("run")
def command(run: str) -> int:
    """Write report.md, report.json and report.png into the folder RUN: of this run, or of all runs below it."""
    folder = Path(run).expanduser().resolve()
    must_be_plain(folder)
    result = comparison.comparison(load_all([str(folder)]))
    text = comparison.markdown(result, f"Report of {folder.name}")
    click.echo(text)
    click.echo("\n".join(map(str, comparison.write(result, text, folder, "report"))))
    return 0
