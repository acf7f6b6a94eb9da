"""``<name>.README.md`` beside collected episodes: the command, commits, teams and data behind them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl.report.run_readme import commits, table_of
from marl.utils.manifest import replace_text
from marl.utils.secret_masking import masked_text

TEXT = """\
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


def path_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}.README.md")


def write(out: Path, teams: str, command: str, facts: Mapping[str, Any]) -> Path:
    """Explain a file of episodes, without the secrets in its command."""
    rows = table_of({**facts, **commits()})
    text = TEXT.format(name=out.name, teams=teams, folder=Path.cwd(), command=command, rows=rows, path=out)
    replace_text(path_of(out), masked_text(text))
    return path_of(out)
