"""The error for an invalid configuration, and its message."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError

from marl.config.short_help import option_names
from marl.utils.registry import did_you_mean


class ConfigError(ValueError):
    """Names the key, its value, what was expected and how to fix it."""


class ModelMissing(ConfigError):
    """No model in the folder ``path``, which the key ``key`` names."""

    def __init__(self, key: str, path: str) -> None:
        super().__init__(
            f"{key}={path}: no config.json there; expected a folder of a Hugging Face model, or a hub id as in org/name"
        )
        self.path = path


def line(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def shown(value: Any) -> str:
    """A value in a message: not longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def explain(error: Exception) -> str:
    """Message for an error from Hydra or OmegaConf: the key, the value, what was expected, the nearest known name."""
    if isinstance(error, MissingConfigException):
        return missing_option(error)
    if isinstance(error, MarkedYAMLError):
        return not_yaml(error)
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override}: expected key=value"
        said = str(error).splitlines()[0]
        return f"{error.override}: cannot be read: {said}; expected key=value; {quote_it(error.override)}"
    if removed := REMOVED.match(str(error)):
        return f"~{removed[1]}: there is no such key to remove; expected one of the configuration's, as --cfg job shows them"
    if several := SEVERAL_VALUES.match(str(error)):
        return f"{several[1]}: a comma outside quotes makes it several values; {quote_it(several[1])}"
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ is not None else error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        known = [str(key) for key in cause.parent_node]
        parent = ".".join(str(cause.full_key).split(".")[:-1])
        return unknown_key(str(cause.key), parent, known, plain(cause.parent_node._get_root()))
    if isinstance(cause, OmegaConfBaseException):
        text = str(cause.msg or cause).splitlines()[0]
        if text.endswith("is not Optional"):
            text = "it cannot be None"
        return f"wrong value for '{cause.full_key}': {text}; expected a value like the default's, see --cfg job"
    return str(error)


def not_yaml(error: MarkedYAMLError) -> str:
    """A sentence on a file's syntax, with the line."""
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name.strip()}, line {mark.line + 1}" if mark else "a configuration file"
    return f"{where}: not YAML: {error.problem or error.context}; quote texts that hold colons, braces or ${{…}}, and indent by spaces"


REMOVED = re.compile(r"Could not delete from config\. '(.*)' does not exist")
SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '(.*)'")


def quote_it(override: str) -> str:
    """Hint on quoting an override whose text contains Hydra syntax."""
    key, _, value = override.partition("=")
    text = value.replace('"', r"\"")
    quoted = shlex.quote(f'"{text}"')
    return f"quote a text that holds commas, colons, brackets or quotes, as in {key.rpartition('.')[2]}={quoted}"


def plain(config: Any) -> dict[str, Any]:
    """A configuration as dicts, its interpolations as they are written."""
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]


WORDS = {
    "lr": "actor_rollout_ref.actor.optim.lr",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "model": "actor_rollout_ref.model.path",
    "model_path": "actor_rollout_ref.model.path",
    "batch_size": "data.train_batch_size",
    "epochs": "trainer.total_epochs",
    "steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "output": "trainer.default_local_dir",
    "output_dir": "trainer.default_local_dir",
    "beta": "method.beta",
    "dpo_beta": "method.beta",
    "kl_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "algorithm": "learner",
    "env": "runner",
    "num_agents": "agents",
}
"""Words for keys, typed from memory of other systems, at the top level."""


MOVED = {
    f"controller.{name}": f"judge.{name.removeprefix('reward_')}"
    for name in (
        "answer_rule", "extractors", "right_at", "failure_score", "no_answer_score", "truncated_score", "overlong_buffer",
        "overlong_penalty", "reward_processes", "reward_timeout_s",
    )
}  # fmt: skip
"""Keys that have another name now."""


def hint_for(key: str, parent: str, root: Mapping[str, Any]) -> str:
    """A sentence that names the key meant by an unknown one of the group ``parent``, or nothing."""
    if moved := MOVED.get(f"{parent}.{key}"):
        return f" It is {moved!r} now."
    node: Any = root
    for part in parent.split(".") if parent else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    known = node if isinstance(node, Mapping) else {}
    group, _, name = key.partition("_")
    inner = known.get(group)
    if not parent and key in WORDS:
        meant: str | None = WORDS[key]
    else:
        meant = (
            f"{parent}{'.' if parent else ''}{group}.{name}" if isinstance(inner, Mapping) and name in inner else None
        )
    return f" Did you mean {meant!r}?" if meant else did_you_mean(key, map(str, known)) or elsewhere(key, root)


def elsewhere(key: str, root: Mapping[str, Any]) -> str:
    """A sentence that names the groups that do have such a key, or nothing."""
    found = list(full_names(key, root))
    return f" Did you mean {' or '.join(map(repr, found))}?" if 0 < len(found) <= 3 else ""


def full_names(key: str, node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every place of a key, in the order of the configuration."""
    for name, inner in node.items():
        if name == key:
            yield f"{prefix}{name}"
        if isinstance(inner, Mapping):
            yield from full_names(key, inner, f"{prefix}{name}.")


def unknown_key(key: str, parent: str, known: Iterable[str], root: Mapping[str, Any]) -> str:
    where, full = (f"'{parent}'", f"{parent}.{key}") if parent else ("the configuration", key)
    added = f" +{full}={{}} adds it." if parent == "agents" else ""
    return f"unknown key '{full}': {where} has no '{key}'.{added}{hint_for(key, parent, root)}{listing(known)}"


def unknown_option(group: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    others = [other for other, options in option_names().items() if name in options and other != group]
    hint = f" It is a {others[0]}: {others[0]}={name}" if others else did_you_mean(name, names)
    return f"unknown option {group}={name}; known: {', '.join(names)}.{hint}"


def missing_option(error: MissingConfigException) -> str:
    wanted = re.search(r"Could not find '([\w/]+)/(\w+)'", str(error))
    if wanted is None:
        return missing_file(error)
    group, name = wanted.groups()
    return unknown_option(group, name, error.options or [])


@cache
def shipped() -> list[str]:
    """The names of the package's own configurations."""
    return sorted(
        path.name.removesuffix(".yaml") for path in files("marl.configs").iterdir() if path.name.endswith(".yaml")
    )


def missing_file(error: MissingConfigException) -> str:
    """A sentence on ``--config-name``, with the names of the package's own files; Hydra's own text for anything else."""
    name = str(error.missing_cfg_file or "").removesuffix(".yaml")
    if "primary config" not in str(error):
        return str(error)
    known = ", ".join(shipped())
    return f"--config-name {name}: no such configuration; known: {known}; a file of yours is --config FILE.{did_you_mean(name, shipped())}"


def listing(known: Iterable[str]) -> str:
    names = sorted(known)
    return f" Known: {', '.join(names)}." if 0 < len(names) <= 20 else ""


def resolve(config: Any) -> None:
    """Replace every interpolation by its value. Raises ConfigError naming the first key that has none."""
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        found = unresolved(config)
        if found is None:
            raise
        key, value = found
        raise ConfigError(
            f"{key}={value}: {str(error).splitlines()[0]}; expected a key of the configuration, or a variable that is set"
        ) from None


def unresolved(node: Any, prefix: str = "") -> tuple[str, Any] | None:
    """The first key whose interpolation leads nowhere, and what it holds."""
    for key in node if OmegaConf.is_dict(node) else range(len(node)):
        inner = node._get_node(key)
        if inner._is_interpolation():
            try:
                inner._dereference_node()
            except OmegaConfBaseException:
                return f"{prefix}{key}", inner._value()
        elif OmegaConf.is_config(inner) and not inner._is_none() and not inner._is_missing():
            found = unresolved(inner, f"{prefix}{key}.")
            if found is not None:
                return found
    return None
