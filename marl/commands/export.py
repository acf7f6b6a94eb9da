"""``marl export RUN``: the policies of a checkpoint as plain Hugging Face folders."""

from pathlib import Path

import click

from marl.evaluation import export


@click.command("export")
@click.argument("run")
@click.option("--step", type=int, help="Step of the checkpoint; by default the newest.")
@click.option(
    "--to", type=click.Path(file_okay=False), help="Folder of the export; by default export/ in the run's folder."
)
@click.option("--merged", is_flag=True, help="Whole models in place of adapters.")
def command(run: str, step: int | None, to: str | None, merged: bool) -> int:
    """Write every policy of RUN, a run's folder or one of its global_step_N, as a folder that transformers loads; adapters
    in PEFT's format, unless --merged."""
    checkpoint = export.checkpoint_of(Path(run).expanduser().resolve(), step)
    target = Path(to).expanduser() if to else checkpoint.parent / "export" / checkpoint.name
    for kind, folder in export.export(checkpoint, target, merged):
        click.echo(f"{kind}: {folder}")
    return 0
