"""The words of a command line: flags of other programs, and their order, as Hydra's parser takes them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from marl.config.errors import ConfigError, shipped
from marl.config.overrides import OPTIONS

NAMED = ("--config-name", "-cn")
VALUED = (
    *NAMED,
    "--config-dir",
    "-cd",
    "--config-path",
    "-cp",
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--experimental-rerun",
)
"""Hydra's flags with a value behind them."""
SHOWN = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values that may stand behind --info."""
POINT = re.compile(r"global_step_\d+")


def train_flags(words: Sequence[str]) -> list[str]:
    """``--config FILE``, ``--output DIR`` and ``--resume CHECKPOINT`` as the words that they stand for."""
    words = renamed(words, {"--config": of_file, "--resume": resumed})
    return renamed(words, {"--output": lambda folder: [f"trainer.default_local_dir={quoted(folder)}"]})


def renamed(words: Sequence[str], flags: Mapping[str, Callable[[str], list[str]]]) -> list[str]:
    """Words with each flag and its value replaced by what they stand for. Raises ConfigError for a flag without a value."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in flags:
            found.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value or value.startswith("-"):
            raise ConfigError(f"{flag}: expected a value behind it, as in {flag} …")
        found += flags[flag](value)
    return found


def of_file(file: str) -> list[str]:
    """Hydra's words for a configuration that is named by its path."""
    path = Path(file).expanduser()
    if not path.is_file():
        if file in shipped():
            return ["--config-name", file]
        raise ConfigError(f"--config {file}: no such file; expected a YAML file, or one of {', '.join(shipped())}")
    if path.suffix != ".yaml":
        raise ConfigError(f"--config {file}: expected a name that ends in .yaml, which Hydra reads")
    written = OmegaConf.to_container(OmegaConf.load(path)) if path.stat().st_size else None
    if not isinstance(written, dict) or "defaults" not in written:
        raise ConfigError(
            f"--config {file}: it has no list of defaults, so that no other key would have a value; let it begin with\n"
            "defaults: [marl, _self_]"
        )
    return ["--config-dir", str(path.absolute().parent), "--config-name", path.stem]


def resumed(checkpoint: str) -> list[str]:
    """The words that continue from a checkpoint, or a run in its own folder."""
    path = Path(checkpoint).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--resume {checkpoint}: no such folder; expected a run's folder, or …/global_step_N of one")
    if POINT.fullmatch(path.resolve().name):
        return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={quoted(str(path.resolve()))}"]
    return ["trainer.resume_mode=auto", f"trainer.default_local_dir={quoted(str(path.resolve()))}"]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def in_order(words: Sequence[str]) -> list[str]:
    """Flags before overrides: Hydra's parser takes overrides in one piece, and none behind a flag that follows them."""
    flags, overrides = parts(words)
    return [*(word for flag in flags for word in flag), *overrides]


def parts(words: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The flags, each with the value behind it, and the overrides."""
    flags: list[list[str]] = []
    overrides: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        takes_one = whole(word) in VALUED or (word in ("--info", "-i") and left[:1] and left[0] in SHOWN)
        flags.append([word, left.pop(0)] if takes_one and left else [word])
    return flags, overrides


def whole(flag: str) -> str:
    """A flag that may be shortened, as Hydra's parser takes it."""
    meant = [full for full in VALUED if len(flag) > len("--") and full.startswith(flag)]
    return meant[0] if len(meant) == 1 else flag


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError for words that Hydra answers with a traceback, and for a second configuration, of which it takes the last."""
    flags, overrides = parts(words)
    for word in overrides:
        key, equals, value = word.partition("=")
        if equals and (not key or (key in OPTIONS and not re.search(r"[A-Za-z]|\{\}", value))):
            raise ConfigError(f"{word}: expected key=value, or the name of an option, as in learner=grpo")
    given = [(flag[0].partition("=")[0], flag[-1].rpartition("=")[2]) for flag in flags]
    named = [value for flag, value in given if whole(flag) in NAMED]
    if len(named) > 1:
        raise ConfigError(
            f"--config-name {named[1]}: a second one, after --config-name {named[0]}; expected one: set what differs by key=value, or "
            "name both in the defaults of a file of yours (--config FILE)"
        )
