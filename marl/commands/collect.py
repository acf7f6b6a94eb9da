"""``marl collect RUN|CHECKPOINT|MODEL … --filter-reward 1 --best-of 2 --out FILE``: a team's episodes, to learn from.

marl collect outputs/quickstart/latest --filter-reward 1 --out best.jsonl
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from marl.commands.evaluate import files_of, labels_of, parsed as parsed_words
from marl.config.errors import ConfigError
from marl.config.external import naming_own, own_modules
from marl.config.identity import content_of, located, plain_of, versions, with_absolute_paths
from marl.config.overrides import hydra_overrides
from marl.config.policies import hosted_policies
from marl.evaluation.saved_settings import must_be_scored_as_in_training
from marl.evaluation.source import Source, find
from marl.main import exit_code, run_composed, shown_by
from marl.preflight.prepare import prepare
from marl.quickstart.assets import prepared
from marl.report import readme
from marl.utils.manifest import MANIFEST, replace_text
from marl.utils.numbers import FINITE, bounded, count
from marl.utils.quiet import quiet
from marl.utils.secret_masking import masked_logs, masked_text

USAGE = (
    "usage: marl collect RUN|CHECKPOINT|MODEL …|--config-name NAME --out FILE.jsonl [--filter-reward SCORE] [--best-of N] [task=train|validation|FILE] "
    "[n=SAMPLES] [key=value …]"
)
HYDRAS = {"--config-name", "-cn", "--config-dir", "-cd"}
"""Options that name a configuration, whose team is collected from before its training."""
SPLITS = {"train": "train_files", "validation": "val_files"}


@dataclass
class Options:
    """Words of the command that are no keys of the configuration."""

    task: Any = "train"
    """The first run's training or validation files, or a file of rows in verl's columns, or a list of them."""
    n: int | None = bounded(None, count(1, 4096, null=True))
    """Samples of each task; null for those of a training step."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {word.partition("=")[0] for word in words} & HYDRAS:
        return of_untrained(words)
    return exit_code(lambda: run(words))


def run(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Play, choose and write; returns the counts. Raises ConfigError."""
    flags, options, named, words = parsed(arguments)
    must_be_new(flags.out)
    must_limit_what_is_played(options, words)
    sources = [find(word) for word in named]
    with quiet("verbose=true" in words), masked_logs():
        for source in sources:
            must_be_scored_as_in_training(source.path, source.saved or {}, words)
        return played_and_written(flags, options, sources, words)


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, Options, list[str], list[str]]:
    """The flags, the options, the teams, and the words for their configurations."""
    flags, rest = flags_of(arguments)
    return flags, *parsed_words(rest, Options, "marl collect", USAGE)


def of_untrained(words: Sequence[str]) -> int:
    """Collect from a configuration's team before training; Hydra composes it as ``marl train`` would. Returns the exit code."""
    read: list[tuple[argparse.Namespace, Options, list[str]]] = []
    composed: list[DictConfig] = []

    def keep(config: DictConfig) -> None:  # a team is opened outside Hydra, which would be begun twice
        composed.append(config)

    code = exit_code(lambda: read.append(words_of_untrained(words)))
    code = code or run_composed(hydra_overrides(read[0][2]), keep)
    if code or (not composed and shown_by(words)):
        return code
    return exit_code(lambda: collect_untrained(*read[0], the_one(composed)))


def the_one(composed: Sequence[DictConfig]) -> DictConfig:
    if len(composed) != 1:
        raise ConfigError(
            f"{len(composed)} configurations: expected one, whose team is collected from; leave out -m, and call once for each"
        )
    return composed[0]


def words_of_untrained(words: Sequence[str]) -> tuple[argparse.Namespace, Options, list[str]]:
    """The flags, the options and Hydra's words. Raises ConfigError."""
    flags, rest = flags_of(words)
    must_be_new(flags.out)
    own = [word for word in rest if word.partition("=")[0] in Options.__dataclass_fields__]
    options, *_ = parsed_words(own, Options, "marl collect", USAGE, least=0)
    words = [word for word in rest if word not in own]
    must_limit_what_is_played(options, words)
    return flags, options, words


def collect_untrained(
    flags: argparse.Namespace, options: Options, words: Sequence[str], config: DictConfig
) -> Mapping[str, Any]:
    with quiet(bool(config.verbose)), masked_logs():
        saved = json.loads(json.dumps(plain_of(prepared(config, prepare).config), default=str))
        path = Path(saved["actor_rollout_ref"]["model"]["path"])
        return played_and_written(flags, options, [Source(path, None, saved, untrained=True)], [], words)


def flags_of(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="marl collect", usage=USAGE.removeprefix("usage: "), allow_abbrev=False)
    parser.add_argument("--out", help="file that the episodes are written to; it must be new")
    parser.add_argument("--filter-reward", type=float, help="least score of the team's answer")
    parser.add_argument("--best-of", type=int, help="number of each task's best episodes")
    flags, rest = parser.parse_known_args(list(arguments))
    bounds = {"filter_reward": FINITE.or_null(), "best_of": count(null=True)}
    for name, bound in bounds.items():
        if not bound.takes(value := getattr(flags, name)):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {bound}")
    return flags, rest


def must_be_new(given: str | None) -> None:
    """Raise ConfigError for an output file that is there already, or cannot be written."""
    if given is None:
        raise ConfigError(f"no --out: expected a new file, such as --out episodes.jsonl; {USAGE}")
    out = Path(given).expanduser()
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {given}: the name ends in {out.suffix!r}; expected .jsonl, which methods read")
    for path in (out, readme.collection_path(out), draft_of(out)):
        if path.exists():
            raise exists(path)
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"--out {given}: {there} cannot be written; name a file in a folder of yours")


def exists(path: Path) -> ConfigError:
    return ConfigError(
        f"--out: {path} exists, and existing files are never overwritten; name another file, or remove it"
    )


def draft_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}.partial.jsonl")


def made(path: Path) -> Path:
    """A new, empty file. Raises ConfigError where it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise exists(path) from None
    return path


@contextmanager
def drafted(out: Path) -> Iterator[Path]:
    """A file for the choice among the teams so far. It stays where a later team fails or is interrupted."""
    draft = made(draft_of(out))
    try:
        yield draft
    finally:
        if draft.exists() and draft.stat().st_size:
            sys.stderr.write(f"chosen of the episodes that were played: {draft}\n")
        else:
            draft.unlink(missing_ok=True)


def write(draft: Path, found: Any) -> None:
    replace_text(draft, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in found.lines()))


def played_and_written(
    flags: argparse.Namespace,
    options: Options,
    sources: Sequence[Source],
    words: Sequence[str],
    named: Sequence[str] | None = None,
) -> Mapping[str, Any]:
    """``named``: the words that the command named the teams by, if not their folders."""
    files, labels, out = task_files(options, sources), labels_of(sources), Path(flags.out).expanduser()
    mine = [f"data.val_files={json.dumps(files)}", *split_limit(options, sources, words), *words]
    # heavy: imported once the command line holds
    from marl.evaluation.collect import Wanted, collect

    wanted = Wanted(options.n, flags.filter_reward, flags.best_of)
    origin = origin_of(sources, labels, files)
    with drafted(out) as draft:
        found = collect(sources, labels, mine, wanted, partial(write, draft))
        os.replace(draft, made(out))
    counts = found.counts()
    facts = {**counts, **played_by(sources, labels, found.samples), **origin}
    teams = named or [str(source.path) for source in sources]
    beside = readme.write_collection(out, ", ".join(labels), command_of(flags, options, teams, words), facts)
    sys.stdout.write(said(counts, out, beside))
    return counts


def task_files(options: Options, sources: Sequence[Source]) -> list[str]:
    """Absolute paths of the files of tasks. Raises ConfigError where there are none."""
    split = split_of(options)
    return files_of(options, sources) if split is None else files_of(Options(task=None), sources, SPLITS[split])


def split_of(options: Options) -> str | None:
    """The split of the run's own data that is played; None for files, one of which may have a split's name."""
    task = str(options.task)
    return task if task in SPLITS and not Path(task).is_file() else None


def given_to(key: str, words: Sequence[str]) -> str | None:
    """The value that a command line gives a key, if any."""
    return next((word.partition("=")[2] for word in reversed(words) if word.lstrip("+").startswith(f"{key}=")), None)


def must_limit_what_is_played(options: Options, words: Sequence[str]) -> None:
    """Raise ConfigError for a limit on the other split's tasks, which would limit nothing."""
    limits = ["data.train_max_samples", "data.val_max_samples"]
    mine, other = limits if split_of(options) == "train" else limits[::-1]
    if (value := given_to(other, words)) is not None:
        raise ConfigError(f"{other}={value}: it does not limit task={options.task}; expected {mine}={value}")


def split_limit(options: Options, sources: Sequence[Source], words: Sequence[str]) -> list[str]:
    """As many training tasks as the first run trains on, or as the command line says, and all of another file: a run's limit on its
    validation is none on them."""
    split = split_of(options)
    if options.task is not None and split is None:
        return ["data.val_max_samples=-1"]
    if sources[0].saved is None or split != "train":
        return []
    given = given_to("data.train_max_samples", words) or sources[0].saved["data"]["train_max_samples"]
    return [f"data.val_max_samples={given}"]


def played_by(sources: Sequence[Source], labels: Sequence[str], samples: Sequence[int]) -> dict[str, str]:
    return {
        f"team {label}": f"`{source.path}`, {n} samples of each task"
        for source, label, n in zip(sources, labels, samples, strict=True)
    }


def origin_of(sources: Sequence[Source], labels: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """Digests of the teams and of the data, and the versions that play."""
    teams = {f"content of {label}": weights_of(source) for source, label in zip(sources, labels, strict=True)}
    data = {f"content of `{file}`": content_of(file) for file in files}
    return teams | data | {f"version of {name}": number for name, number in versions().items()}


def weights_of(source: Source) -> str:
    manifest = source.path / MANIFEST
    path = str(manifest if manifest.is_file() else source.path)
    if source.untrained and not hosted_policies(OmegaConf.create(source.saved)):
        return "none here: endpoints alone answer"
    return "a hub id, not a folder here" if located(path) is None else content_of(path)


def command_of(flags: argparse.Namespace, options: Options, teams: Sequence[str], words: Sequence[str]) -> str:
    """The command line that gives these episodes again, where the servers are reproducible."""
    own = [f"task=[{','.join(options.task)}]" if isinstance(options.task, list) else f"task={options.task}"]
    own += [f"n={options.n}"] * (options.n is not None)
    for name in ("filter_reward", "best_of", "out"):
        if (value := getattr(flags, name)) is not None:
            own += [f"--{name.replace('_', '-')}", str(value)]
    words = [with_absolute_paths(word) for word in words]
    return masked_text(naming_own(own_modules()) + shlex.join(["marl", "collect", *teams, *own, *words]))


def said(counts: Mapping[str, Any], out: Path, beside: Path) -> str:
    words = f"to imitate them: method=sft method.source=episodes data.train_files=[{out}] data.val_files=null"
    return (
        f"kept {counts['episodes kept']} of {counts['episodes played']} episodes ({counts['tasks kept']} of {counts['tasks played']} "
        f"tasks); accuracy {counts['accuracy of all']:.3f} of all, {counts['accuracy of the kept']:.3f} of the kept\n"
        f"episodes: {out}   their origin: {beside}\n{words}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
