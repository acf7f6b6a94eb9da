"""A run's identity: its settings, the contents of the files that they name and the versions of the packages it runs on.

A run that is resumed must be the run that was saved; what differs is named. What a run may change as it goes on is in
``MAY_DIFFER``.
"""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from marl.config.endpoints import RESUMABLE, access_keys
from marl.config.external import own_modules, source_roots
from marl.utils.secret_masking import masked

MAY_DIFFER = (
    "*.total_training_steps",
    "trainer.total_epochs",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.default_hdfs_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_*",
    "trainer.save_*",
    "trainer.test_freq",
    "trainer.val_*",
    "trainer.log_*",
    "trainer.max_*_ckpt_to_keep",
    "trainer.keep_*",
    "data.val_*",
    "actor_rollout_ref.rollout.val_kwargs.*",
    "baseline",
    "verbose",
    "trusted_targets",
    "*profiler.*",
    "*.rollout.prometheus.*",
    "assets",
    "task",
    "ensemble.*",
    "ray_kwargs.*",
    "resources.*",
    "*.rollout.gpu_memory_utilization",
    "controller.num_workers",
    "controller.ledger",
    "controller.keep_ledger",
    "judge.processes",
    "controller.episode_timeout_s",
    "judge.timeout_s",
    "controller.log_prob_gap_alarm",
    "controller.lazy_agent_share",
    "controller.degenerate_steps",
    "controller.max_error_rate",
    *(f"policies.*.endpoint.{key}" for key in RESUMABLE),
)
"""Keys that do not affect training: length, frequencies, output locations, machines, validation."""
PACKAGES = ("marl", "verl", "torch", "transformers", "ray", "tensordict", "numpy", "peft", "vllm", "sglang")
PATH_KEY = re.compile(r"(^|(?<!save)(?<!output)(?<!log)_)(path|file|files)$")
PATH = re.compile(r"""[^][,'"\s](?:[^][,'"]*[^][,'"\s])?""")
"""A path in a value: alone, quoted, or in a list."""
WHOLE_BYTES = 1 << 20
"""Size limit for hashing files of a folder, such as a model's; of larger files only the size counts."""


def identity_of(config: Any) -> dict[str, Any]:
    """The content of ``run.json`` of a resolved configuration, without secrets."""
    plain = plain_of(config)
    return {
        "config": settings_of(config),
        "agents_in_order": list(plain.get("agents") or {}),
        "contents": {key: content_of(value) for key, value in leaves(plain) if names_a_path(key, value)},
        "versions": versions(),
        "modules": own_modules(),
    }


def plain_of(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True)


def settings_of(config: Any) -> Any:
    """All settings without secrets, for files and trackers that others see."""
    plain = plain_of(config)
    return masked(plain, hidden=access_keys(plain))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value under its dotted key; a list is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def names_a_path(key: str, value: Any) -> bool:
    """True if a value names existing files or folders; these are identified by their contents."""
    paths = value if isinstance(value, list) else [value]
    named = PATH_KEY.search(key.rsplit(".", 1)[-1]) is not None and not may_differ(key, ())
    return named and bool(paths) and all(isinstance(path, str) and located(path) is not None for path in paths)


def located(path: str) -> Path | None:
    """The file or folder of a path, or of a module (``pkg://a.b``), where there is one."""
    if path.startswith("pkg://"):
        try:
            found = importlib.util.find_spec(path.removeprefix("pkg://").replace("/", "."))
        except (ImportError, ValueError):
            return None
        return Path(found.origin) if found and found.origin and Path(found.origin).is_file() else None
    there = Path(path.removeprefix("file://")).expanduser()
    return there if path and there.exists() else None


def with_absolute_paths(word: str) -> str:
    """A ``key=value`` that means the same in any working folder."""
    key, _, value = word.partition("=")
    if PATH_KEY.search(key.rpartition(".")[2]) is None or "://" in value:
        return word
    if located(value):
        return f"{key}={absolute(value)}"
    return f"{key}={PATH.sub(lambda path: absolute(path[0]), value)}"


def absolute(path: str) -> str:
    there = located(path)
    return path if there is None else str(there.resolve())


def content_of(value: str | list[str]) -> str:
    """Digest of the contents of a file, a folder, or a list of them."""
    if isinstance(value, list):
        return digest("\n".join(content_of(path) for path in value).encode())
    path = located(value)
    if path is None:
        raise FileNotFoundError(value)
    return folder_digest(path) if path.is_dir() else file_digest(path)


def folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    sizes = {path: path.stat().st_size for path in files}
    parts = [
        f"{path.relative_to(folder)} {sizes[path]} {file_digest(path) if sizes[path] <= WHOLE_BYTES else ''}"
        for path in files
    ]
    return digest("\n".join(parts).encode())


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def fingerprints(identity: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Digests of a run's settings, its data files and all source files; of an unknown run, of the last alone."""
    parts = dict.fromkeys(("configuration", "data", "versions"))
    if identity is not None and "config" in identity:
        data = {key: value for key, value in identity["contents"].items() if key.startswith("data.")}
        parts = {"configuration": identity["config"], "data": data, "versions": identity["versions"]}
    digests = {
        name: None if part is None else digest(json.dumps(part, sort_keys=True, default=str).encode())
        for name, part in parts.items()
    }
    return digests | {"code": code_fingerprint()}


@cache
def code_fingerprint() -> str:
    """Digest of marl's source files, and of those of the user's own modules and of the packages that these are in."""
    roots = [Path(__file__).parents[1], *source_roots()]
    found = [(path.relative_to(root.parent), path) for root in roots for path in source_files(root)]
    return digest("\n".join(f"{name} {file_digest(path)}" for name, path in found).encode())


def source_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py")) if root.is_dir() else [root]


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def differences(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (saved, new)} of all that differs. A path is compared by what lies there, if both runs could read it."""
    before, after = comparable(saved), comparable(new)
    keys = dict.fromkeys([*before, *after])
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not same_content(key, saved, new)
    }


def comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(leaves(identity["config"]))
    flat |= {f"versions.{name}": number for name, number in identity["versions"].items()}
    contents = {f"contents of {key}": value for key, value in identity["contents"].items()}
    return flat | contents | {"order of agents": identity["agents_in_order"]}


def same_content(key: str, saved: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    known = [identity["contents"].get(key) for identity in (saved, new)]
    return known[0] is not None and known[0] == known[1]


def may_differ(key: str, changes: tuple[str, ...]) -> bool:
    """True if a resumed run may change this key; ``changes`` are keys, or groups of keys, that the user allows."""
    allowed = any(key == change or key.startswith(f"{change}.") for change in changes)
    return allowed or any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER)


def refused(saved: Mapping[str, Any], new: Mapping[str, Any], changes: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """Differences that are not allowed. ``contents of x`` may differ where ``x`` may."""
    found = differences(saved, new)
    return {key: values for key, values in found.items() if not may_differ(key_of(key), changes)}


def key_of(difference: str) -> str:
    """The key of the configuration that a difference is about."""
    return difference.removeprefix("contents of ").removeprefix("order of ")
