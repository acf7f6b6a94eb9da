"""``marl eval RUN|CHECKPOINT|MODEL … task=FILE n=4``: how good trained teams are, on the same tasks.

marl eval outputs/quickstart/latest baselines=[solo,vote]
"""

import hashlib
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from marl.config.errors import ConfigError
from marl.config.external import naming_own, own_modules
from marl.config.identity import content_of, versions, with_absolute_paths
from marl.config.words import renamed
from marl.data.rows import file_list
from marl.evaluation.saved_settings import must_be_scored_as_in_training
from marl.evaluation.source import Source, find, reads_examples
from marl.evaluation.statistics import MEASURES
from marl.main import exit_code
from marl.utils.numbers import bounded, count
from marl.utils.quiet import quiet
from marl.utils.registry import typed
from marl.utils.secret_masking import masked_logs, masked_text

USAGE = "usage: marl eval RUN|CHECKPOINT|MODEL … [task=FILE] [n=SAMPLES] [baselines=[solo,vote]] [leave_one_out=true] [key=value …]"


@dataclass
class Options:
    """Words of the command that are no keys of the configuration."""

    task: Any = None
    """A file of rows in verl's columns, or a list of them; null for the validation files of the first team."""
    n: int | None = bounded(None, count(1, 4096, null=True))
    """Samples of each task; null for those of the run's validation."""
    measures: list[str] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    leave_one_out: bool = False
    name: str | None = None
    """Folder of the results within ``evaluations``; null for one that names all that decides them."""


def of_environment(file: str) -> list[str]:
    if not Path(file).expanduser().is_file():
        raise ConfigError(
            f"--environment {file}: no such file; expected a file of tasks. A team plays in the world that it was trained in: leave "
            "this out for it"
        )
    return [f"task={file}"]


FLAGS = {
    "--model": lambda path: [path],
    "--environment": of_environment,
    "--num-episodes": lambda number: [f"data.val_max_samples={number}"],
    "--output": lambda folder: [f"name={Path(folder).expanduser().absolute()}"],
}
"""Flags of other programs, and the words that they stand for."""


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Evaluate, write and print; returns what ``result.json`` holds. Raises ConfigError."""
    options, named, words = parsed(renamed(arguments, FLAGS))
    sources = [find(word) for word in named]
    with quiet("verbose=true" in words), masked_logs():
        return measure(options, sources, words)


def parsed(
    arguments: Sequence[str], kind: type[Any] = Options, command: str = "marl eval", usage: str = USAGE, least: int = 1
) -> tuple[Any, list[str], list[str]]:
    """The options, the teams, and the words for their configurations."""
    teams = [word for word in arguments if "=" not in word or Path(word).expanduser().exists()]
    own = [word for word in arguments if word.partition("=")[0] in kind.__dataclass_fields__]
    flags = [word for word in teams if word.startswith("-")]
    if flags or len(teams) < least:
        raise ConfigError(f"{flags[0] if flags else 'no team'}: expected a run, a checkpoint or a model; {usage}")
    try:
        given = OmegaConf.to_container(OmegaConf.from_dotlist(own))
        options = typed("", kind, given)  # type: ignore[arg-type]
    except yaml.YAMLError:
        raise ConfigError(
            f"{' '.join(own)}: cannot be read; expected option=value, as in measures=[similarity]"
        ) from None
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{str(error).splitlines()[0].lstrip('.')}; {usage}") from None
    return options, teams, [word for word in arguments if word not in own and word not in teams]


def measure(options: Options, sources: Sequence[Source], words: Sequence[str]) -> Mapping[str, Any]:
    # heavy: imported once the command line is read
    from marl.evaluation.evaluate import comparisons, evaluate, must_read_the_same_tasks
    from marl.report import evaluation as report

    for source in sources:
        must_be_scored_as_in_training(source.path, source.saved or {}, words)
    asked, files, labels = asked_of(options), files_of(options, sources), labels_of(sources)
    command = command_of(options, sources, files, words)
    name = options.name or name_of(sources, command)
    folder = folder_of(sources[0], name, command)
    # the run's limit is one on its own validation
    all_rows = [] if options.task is None else ["data.val_max_samples=-1"]
    mine = [f"data.val_files={json.dumps(files)}", *all_rows, *words]
    must_read_the_same_tasks(sources, mine)
    found = [
        evaluate(source, mine, asked, folder / "episodes" / label)
        for source, label in zip(sources, labels, strict=True)
    ]
    result = {
        "name": name,
        "command": command,
        "task": tasks_of(files, found[0]),
        "samples": found[0].sampling["n"],
        "seed": seed_of(sources[0], words),
        "versions": versions(),
        "teams": [team_of(one, label) for label, one in zip(labels, found, strict=True)],
        "comparisons": comparisons(found, labels),
    }
    report.write(result, folder)
    sys.stdout.write(f"{report.markdown(result)}\nresults: {folder}\n")
    return result


def asked_of(options: Options) -> Any:
    """Raises ConfigError for an unknown measure or baseline."""
    from marl.evaluation.evaluate import BASELINES, Asked, known

    measures, baselines = (
        known("measures", options.measures, MEASURES),
        known("baselines", options.baselines, BASELINES),
    )
    return Asked(options.n, measures, baselines, options.leave_one_out)


def tasks_of(files: Sequence[str], found: Any) -> dict[str, Any]:
    contents = {file: content_of(file) for file in files}
    return {"files": files, "contents": contents, "digest": found.validation, "tasks": len(found.right_T)}


def team_of(found: Any, label: str) -> dict[str, Any]:
    source = {"label": label, "path": str(found.source.path), "step": found.source.step}
    return {**source, "sampling": found.sampling, **found.numbers}


def files_of(options: Any, sources: Sequence[Source], key: str = "val_files") -> list[str]:
    """Absolute paths of the files of tasks: ``options.task``, or the first run's. Raises ConfigError where there are none."""
    given = options.task
    if given is None and sources[0].saved is None:
        raise ConfigError(
            f"task: {sources[0].path} is a model without a run's data; add task=FILE, rows in verl's columns (docs/data.md)"
        )
    if given is None and reads_examples(sources[0]):
        raise ConfigError(
            f"task: {sources[0].path} is of a run that read examples (method={sources[0].saved['method']['name']}), not tasks; add "
            "task=FILE, rows in verl's columns (docs/data.md)"
        )
    files = [Path(str(file)).expanduser() for file in file_list(given or sources[0].saved["data"][key] or [])]
    if not files:
        what = "validation" if key == "val_files" else "training"
        raise ConfigError(f"task: the run has no {what} files; add task=FILE")
    for file in files:
        if not file.is_file():
            named = "task" if given else f"data.{key} of the run"
            raise ConfigError(
                f"{named}={file}: no such file; expected rows in verl's columns (docs/data.md), name them with task=FILE"
            )
    return [str(file.resolve()) for file in files]


def labels_of(sources: Sequence[Source]) -> list[str]:
    """Names for tables and folders; equal ones are numbered."""
    names = [source.name for source in sources]
    return [name if names.count(name) == 1 else f"{name}.{i}" for i, name in enumerate(names, start=1)]


def command_of(options: Options, sources: Sequence[Source], files: Sequence[str], words: Sequence[str]) -> str:
    """The command line that gives these numbers again, wherever it is typed on this machine."""
    task = files[0] if len(files) == 1 else f"[{','.join(files)}]"
    own = [f"task={task}"]
    own += [f"{key}={value}" for key in ("n", "name") if (value := getattr(options, key)) is not None]
    own += [f"{key}=[{','.join(value)}]" for key in ("measures", "baselines") if (value := getattr(options, key))]
    own += ["leave_one_out=true"] * options.leave_one_out
    words = [with_absolute_paths(word) for word in words]
    command = shlex.join(["marl", "eval", *(str(source.path) for source in sources), *own, *words])
    return masked_text(naming_own(own_modules()) + command)


def name_of(sources: Sequence[Source], command: str) -> str:
    first = "model" if sources[0].step is None else f"step_{sources[0].step}"
    return f"{first}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


def folder_of(source: Source, name: str, command: str) -> Path:
    """The folder of the results, made now. Raises ConfigError where it cannot be, and where it holds those of another command."""
    folder = source.results / name
    earlier = folder / "result.json"
    if earlier.is_file() and json.loads(earlier.read_text())["command"] != command:
        raise ConfigError(f"name={name}: {folder} holds the results of another evaluation; choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); expected a folder that results can be written into"
        ) from None


def seed_of(source: Source, words: Sequence[str]) -> int:
    given = [word.partition("=")[2] for word in words if word.startswith("seed=")]
    return int(given[-1]) if given else 0 if source.saved is None else int(source.saved["seed"])


if __name__ == "__main__":
    sys.exit(main())
