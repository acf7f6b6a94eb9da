"""``marl info [KIND] [NAME]``: what can be named on a command line, with keys, defaults and papers."""

import json
import textwrap
from collections.abc import Sequence
from functools import partial

import click

from marl import catalogue
from marl.catalogue import KINDS, Entry
from marl.config.errors import ConfigError

WIDTH = 110


@click.command("info")
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print NAME's keys as a YAML file to change.")
def command(kind: str | None, name: str | None, as_json: bool, as_yaml: bool) -> int:
    """List learners, runners, credits, methods, worlds, rewards, engines and settings; all of a KIND; or one NAME with its keys,
    their defaults and its papers."""
    found = chosen(kind, name)
    if as_json:
        click.echo(json.dumps([entry.as_json() for entry in found], indent=1, ensure_ascii=False))
    elif as_yaml:
        click.echo(yaml_of(found[0] if name else None))
    elif name is not None:
        click.echo(page(found[0]))
    elif kind is not None:
        click.echo(table(found))
    else:
        click.echo(overview())
    return 0


def chosen(kind: str | None, name: str | None) -> Sequence[Entry]:
    if kind is None:
        return [entry for known in KINDS for entry in catalogue.entries(known)]
    return catalogue.entries(kind) if name is None else [catalogue.named(kind, name)]


def overview() -> str:
    lines = []
    for kind in KINDS:
        names = ", ".join(entry.name for entry in catalogue.entries(kind))
        lines.append(textwrap.fill(names, WIDTH, initial_indent=f"{kind:<10}", subsequent_indent=" " * 10))
    return "\n".join(
        [*lines, "", "marl info learners: one line for each; marl info learners happo: its keys and papers"]
    )


def table(entries: Sequence[Entry]) -> str:
    width = 2 + max(len(entry.name) for entry in entries)
    return "\n".join(
        textwrap.fill(
            f"{entry.summary}{missing_papers(entry)}",
            WIDTH,
            initial_indent=f"{entry.name:<{width}}",
            subsequent_indent=" " * width,
        )
        for entry in entries
    )


def missing_papers(entry: Entry) -> str:
    """The papers that the summary does not name."""
    rest = [paper for paper in entry.papers if paper not in entry.summary]
    return f" (arXiv:{', '.join(rest)})" if rest else ""


def page(entry: Entry) -> str:
    parts = [click.style(f"{entry.kind} {entry.name}", bold=True), entry.text]
    parts += [f"use: {entry.use}"] if entry.use else []
    if entry.keys:
        group = entry.use.partition("=")[0] if entry.kind in ("learner", "runner", "credit") else ""
        parts.append("keys:\n" + "\n".join(key_lines(key, group) for key in entry.keys))
    parts += (
        [f"papers: {', '.join(f'https://arxiv.org/abs/{paper}' for paper in entry.papers)}"] if entry.papers else []
    )
    parts += [f"file: {entry.file}"] if entry.file else []
    return "\n\n".join(parts)


def yaml_of(entry: Entry | None) -> str:
    """A file of a group with all keys of a class, each with its text above it. Raises ConfigError where there are no keys."""
    if entry is None or not entry.keys or entry.kind not in ("learner", "runner", "credit", "method"):
        raise ConfigError(
            "--yaml: expected one learner, runner, credit or method with keys, as in marl info learners happo --yaml"
        )
    comment = partial(textwrap.wrap, width=WIDTH, initial_indent="# ", subsequent_indent="# ")
    lines = [
        *comment(f"{entry.summary}."),
        *comment(f"As mine/{entry.kind}/own.yaml it is chosen by: --config-dir mine {entry.kind}=own"),
        f"defaults: [{entry.name}]",
    ]
    for key in entry.keys:
        lines += ["", *comment(f"{key.doc} ({key.type})"), f"{key.name}: {key.default}"]
    return "\n".join(lines)


def key_lines(key: catalogue.Key, group: str) -> str:
    place = f"{group}.{key.name}" if group else key.name
    head = f"  {place} = {key.default}   ({key.type})"
    doc = textwrap.fill(key.doc, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return f"{head}\n{doc}" if key.doc else head
