"""``README.md`` of a run's folder, and that of collected episodes: the command, commits, versions and data behind them."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marl.config.external import VARIABLE
from marl.utils.manifest import replace_text
from marl.utils.secret_masking import masked_text

NAME = "README.md"
PATIENCE_S = 10
TEXT = """\
# {title}

{played}; agents: {agents}. Seed {seed}.

Started {started}{resumed}. Command, in `{folder}`:

```bash
{command}
```

| | |
|---|---|
{rows}

`run.json` holds all settings, `metrics.jsonl` the numbers of every step, `validation/` and `rollouts/` the episodes,
`global_step_N/` checkpoints. `marl report {here}` sums them up, and the same command continues the run if it did not end.
"""

COLLECTION = """\
# {name}

Episodes of {teams}. Command, in `{folder}`:

```bash
{command}
```

| | |
|---|---|
{rows}

One line for each turn, as in a run's dumps. To imitate them: `method=sft method.source=episodes data.train_files=[{path}]`.
"""


def write(folder: Path, learns: bool, words: Sequence[str] | None = None) -> Path:
    """Explain a run's folder from its ``run.json`` and the command line, without the secrets in it; ``learns``: true if its method
    uses the learner."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    command = command_line(sys.orig_argv if words is None else words)
    parts = parts_of(record["config"], learns)
    replace_text(folder / NAME, masked_text(text_of(record, folder, parts, command)))
    return folder / NAME


def text_of(record: Mapping[str, Any], folder: Path, parts: Sequence[str], command: str) -> str:
    config = record["config"]
    facts = commits()
    facts |= {f"version of {name}": number for name, number in record["versions"].items()}
    facts |= {f"content of `{key}`": digest for key, digest in record["contents"].items()}
    modules = record.get("modules", {})
    times = [entry["at"] for entry in record.get("resumed", [])]
    return TEXT.format(
        title=config["trainer"]["experiment_name"],
        played=", ".join(f"{part} {config[part]['name']}" for part in parts),
        agents=", ".join(record["agents_in_order"]),
        seed=config["seed"],
        started=record["started"],
        resumed=f", resumed {', '.join(times)}" if times else "",
        folder=Path.cwd(),
        command=f"{VARIABLE}={','.join(modules)} {command}" if modules else command,
        rows=table_of(facts),
        here=folder,
    )


def collection_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.README.md")


def write_collection(out: Path, teams: str, command: str, facts: Mapping[str, Any]) -> Path:
    """Explain a file of episodes, without the secrets in its command."""
    rows = table_of({**facts, **commits()})
    text = COLLECTION.format(name=out.name, teams=teams, folder=Path.cwd(), command=command, rows=rows, path=out)
    replace_text(collection_path(out), masked_text(text))
    return collection_path(out)


def parts_of(config: Mapping[str, Any], learns: bool) -> tuple[str, ...]:
    """The groups that decide how a run learns: a method that reads its data plays nothing, and without a learner no credit is
    given."""
    method = config.get("method") or {"name": "rl"}
    named, played = method["name"] != "rl", method.get("source", "play") == "play"
    return (*["method"] * named, *["runner"] * played, *["learner", "credit"] * learns)


def command_line(words: Sequence[str]) -> str:
    """The command as a shell takes it: ``marl`` or ``python`` in place of their paths."""
    names = [Path(word).name for word in words[:2]]
    if len(names) == 2 and names[1] == "marl":
        return shlex.join(["marl", *words[2:]])
    return shlex.join([names[0].rstrip("0123456789.") or "python", *words[1:]])


def commits() -> dict[str, str]:
    """The commits of marl and of the working folder, for a table."""
    return {"commit of marl": commit_of(Path(__file__).parent), "commit of the working folder": commit_of(Path.cwd())}


def table_of(facts: Mapping[str, Any]) -> str:
    """Rows of a table with two columns."""
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items())


def commit_of(folder: Path) -> str:
    """The commit of a working tree, and whether files in it have changed since."""
    found = git(folder, "rev-parse", "HEAD")
    if found is None:
        return "unknown: no git repository"
    return f"{found}{', with changes' if git(folder, 'status', '--porcelain', '--untracked-files=no') else ''}"


def git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
