"""``marl doctor``: checks of this machine, each with its remedy."""

from collections.abc import Iterator

import click

from marl.health import machine, packages, services
from marl.health.finding import Finding, State

COLOURS = {State.ok: "green", State.note: "yellow", State.problem: "red"}


@click.command("doctor")
@click.option("--outputs", default="outputs", show_default=True, help="Folder that runs write into.")
def command(outputs: str) -> int:
    """Check Python, packages, GPUs, NCCL, shared memory, disk, limits, the Ray cluster and the processes of rewards.
    Exits with 1 where there is a problem."""
    problems = 0
    for finding in findings(outputs):
        click.echo(line(finding))
        problems += finding.state is State.problem
    click.echo(f"\n{problems} problem{'s' * (problems != 1)}")
    return int(problems > 0)


def findings(outputs: str) -> Iterator[Finding]:
    yield from packages.python_and_packages()
    yield from packages.engines(len(machine.driver_gpus()))
    yield from machine.gpus()
    yield machine.shared_memory()
    yield machine.disk(outputs)
    yield from machine.limits()
    yield services.ray_cluster()
    yield services.token()
    yield from services.sandbox()


def line(finding: Finding) -> str:
    state = click.style(f"{finding.state.value:<8}", fg=COLOURS[finding.state])
    mend = f"\n{'':<10}→ {finding.mend}" if finding.mend else ""
    return f"{state}{finding.name}: {finding.said}{mend}"
