"""Errors that a command line's words alone show, reported before torch is imported, which listing the learners needs."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from marl.config.errors import ConfigError, explain, shipped, unknown_key, unknown_option
from marl.config.external import VARIABLE
from marl.config.identity import leaves
from marl.config.known_keys import OPEN, READ, TYPED, known_keys
from marl.config.overrides import OPTIONS, VERL
from marl.config.short_help import option_names
from marl.config.unread import QUICKSTARTS, check_top_level, unread

NAMED = ("--config-name", "-cn")
FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp")
VALUED = (*NAMED, *FOLDERS, "--cfg", "-c", "--package", "-p", "--experimental-rerun")
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
    """Raise ConfigError for the first word that no configuration could take."""
    flags, overrides = parts(words)
    searched = [word for word in overrides if word.startswith("hydra.searchpath=")]
    own_files = check_flags(flags) or any(word != f"hydra.searchpath=[{VERL}]" for word in searched)
    for word in overrides:
        check_override(word)
    if not own_files and not os.environ.get(VARIABLE):
        check_names(overrides)


def check_flags(flags: Sequence[Sequence[str]]) -> bool:
    """True where they name files of the user's. Raises ConfigError for a second configuration, and for a folder that is not there."""
    given = [(whole(flag), value) for flag, value in (pair(flag) for flag in flags)]
    named = [value for flag, value in given if flag in NAMED]
    if len(named) > 1:
        raise ConfigError(
            f"--config-name {named[1]}: a second one, after --config-name {named[0]}; expected one: set what differs by key=value, or "
            "name both in the defaults of a file of yours (--config FILE)"
        )
    for flag, folder in given:
        if flag in ("--config-dir", "-cd") and not Path(folder).expanduser().is_dir():
            raise ConfigError(f"{flag} {folder}: no such folder; expected the one that holds your YAML files")
    return any(flag in FOLDERS for flag, _ in given) or any(name not in shipped() for name in named)


def pair(flag: Sequence[str]) -> tuple[str, str]:
    if len(flag) == 2:
        return flag[0], flag[1]
    name, _, value = flag[0].partition("=")
    return name, value


def check_override(word: str) -> None:
    key, equals, value = word.partition("=")
    if equals and not key:
        raise ConfigError(f"{word}: there is no key; expected key=value")
    if equals and key in OPTIONS and not re.search(r"[A-Za-z]|\{\}", value):
        raise ConfigError(f"{word}: expected the name of an option, as in learner=grpo")
    if equals and not value and key in ("data.train_files", "data.val_files"):
        raise ConfigError(f"{word}: expected a file, or a list of files, behind the sign; data.val_files may be null")
    if not equals and not word.startswith("~"):
        raise ConfigError(f"{word}: expected key=value{meant_by(word)}")
    try:
        OverridesParser.create().parse_overrides([word])
    except HydraException as error:
        raise ConfigError(explain(error)) from None


def meant_by(word: str) -> str:
    """Suggestion for a word without ``=``."""
    if word in shipped():
        return f"; that configuration is --config-name {word}"
    if Path(word).is_file():
        return f"; a file of yours is --config {word}, and rows are data.train_files={word}"
    if Path(word).is_dir():
        return f"; a run is continued by --resume {word}"
    groups = [group for group, names in option_names().items() if word in names]
    return f"; did you mean {groups[0]}={word}?" if groups else ", as in learner=grpo or seed=1"


def check_names(overrides: Sequence[str]) -> None:
    """Raise ConfigError for the first option or key that is not known."""
    settings = [setting for word in overrides if (setting := SETTING.fullmatch(word))]
    keys = [setting["key"] for setting in settings]
    for setting in settings:
        added, key, value = setting["added"], setting["key"], setting["value"]
        if key in OPTIONS and not added:
            check_option(key, value)
        elif "." not in key:
            check_top(key, value, bool(added), "".join(overrides))
        elif not any(own.startswith("data.custom_cls") for own in keys):
            check_key(key, bool(added))
            if remedy := unread(key):
                check_value(key, value, remedy)


SETTING = re.compile(r"(?P<added>\+{0,2})(?P<key>(?!hydra)[\w.]+)=(?P<value>.*)", re.DOTALL)


def check_top(key: str, value: str, added: bool, text: str) -> None:
    known = {**known_keys(), **{name: {} for name in (*TYPED, *OPTIONS, *QUICKSTARTS)}}
    if not added and key not in known:
        raise ConfigError(unknown_key(key, "", known, known))
    if "${" not in text:  # which may refer to it
        check_top_level({key: value}, known)


def check_option(group: str, value: str) -> None:
    for name in value.split(",") if re.fullmatch(r"[\w,]+", value) else ():
        if name not in (known := option_names()[group]):
            raise ConfigError(unknown_option(group, name, known))


def check_key(key: str, added: bool) -> None:
    """Raise ConfigError for a key that a group of verl's does not have. Whether a class has an added one is not seen here."""
    node: Any = known_keys()
    walked: list[str] = []
    if key.split(".")[0] not in node or key.split(".")[0] in TYPED:
        return
    for name in key.split("."):
        group = ".".join(walked)
        if not isinstance(node, Mapping) or not node or group in OPEN or (added and "_target_" in node):
            return
        if name not in node:
            if added and name in READ.get(group, ()):
                return
            raise ConfigError(unknown_key(name, group, node, known_keys()))
        node = node[name]
        walked.append(name)


def check_value(key: str, value: str, remedy: str) -> None:
    """Raise ConfigError for a key without effect that is set to anything but its default."""
    try:
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        return
    if given != dict(leaves(known_keys())).get(key):
        raise ConfigError(f"{key}={value}: it has no effect; {remedy}")
