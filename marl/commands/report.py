"""``marl report RUN|SWEEP``: the report of a run, or of all runs below a folder, written beside them."""

from pathlib import Path

import click

from marl.comparison import files, tables
from marl.comparison.runs import load_all, swept_keys
from marl.preflight.unfinished import must_be_plain


@click.command("report")
@click.argument("run")
def command(run: str) -> int:
    """Write report.md, report.json and report.png into the folder RUN: of this run, or of all runs below it."""
    folder = Path(run).expanduser().resolve()
    must_be_plain(folder)
    result = tables.comparison(load_all([str(folder)]), swept_keys(str(folder)))
    text = tables.markdown(result, f"Report of {folder.name}")
    click.echo(text)
    click.echo("\n".join(map(str, files.write(result, text, folder, "report"))))
    return 0
