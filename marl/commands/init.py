"""``marl init NAME``: a small project with a learner, a runner, a world, a reward, data, a test and an experiment."""

import csv
import importlib.util
import io
import keyword
import random
from pathlib import Path

import click

from marl.config.errors import ConfigError
from marl.quickstart.tasks import word_problem

TEMPLATE = Path(__file__).parents[1] / "project_template"
PLACEHOLDER, SUFFIX = "NAME", ".tmpl"
PACKAGE = ("__init__.py", "learner.py", "runner.py", "world.py", "reward.py")
"""Files of the project's package; the others lie beside it."""
QUESTIONS = 200


@click.command("init")
@click.argument("name")
def command(name: str) -> int:
    """Write the project NAME into a new folder of that name. It runs, and passes its tests, as it is."""
    folder = Path(name)
    check_name(folder)
    try:
        write(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose a folder that can be made") from None
    click.echo(f"{folder}: cd {folder}, then python -m pytest, then ./train.sh; README.md says what is where")
    return 0


def write(folder: Path) -> None:
    for path, text in files(folder.name).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "train.sh").chmod(0o755)


def check_name(folder: Path) -> None:
    """Raise ConfigError for a name that no new package can have."""
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            f"{name}: expected lower-case letters, digits and _, like a Python package's name: marl init my_team"
        )
    if PLACEHOLDER.lower() == name or (importlib.util.find_spec(name) is not None and not folder.exists()):
        raise ConfigError(
            f"{name}: there is a Python package of this name, which the project's would hide; choose another name"
        )
    if folder.exists():
        raise ConfigError(f"{folder}: it exists, and nothing is written over; choose another name, or remove it")


def files(name: str) -> dict[str, str]:
    """The project's files by path."""
    found = {}
    for path in sorted(TEMPLATE.glob(f"*{SUFFIX}")):
        file = path.name.removesuffix(SUFFIX)
        text = path.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
        found[f"{name}/{file}" if file in PACKAGE else file] = text
    return found | {"questions.csv": questions(), ".gitignore": "outputs/\n__pycache__/\n"}


def questions() -> str:
    """Word problems in words that the toy model knows."""
    rng, text = random.Random(0), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("question", "answer"))
    for _ in range(QUESTIONS):
        question, answer, *_rest = word_problem(rng)
        writer.writerow((question, answer))
    return text.getvalue()
