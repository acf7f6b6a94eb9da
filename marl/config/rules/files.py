"""Rules about the files and folders that a run names."""

import os
from pathlib import Path
from typing import Any

from marl.config.dataset_rows import DATA_SUFFIXES, file_list
from marl.config.errors import ConfigError, ModelMissing
from marl.config.kinds import answers_only
from marl.config.sources import Source


def models_exist(config: Any) -> None:
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    for name, changes in config.policies.items():
        model = (changes or {}).get("model") or {}
        if "path" in model:
            paths[f"policies.{name}.model.path"] = model["path"]
    references = {"actor_rollout_ref.ref.model.path": config.actor_rollout_ref.ref.model.get("path")}
    paths |= {key: path for key, path in references.items() if path is not None}
    for key, path in paths.items():
        expanded = Path(str(path)).expanduser()
        looks_local = str(path).startswith(("/", "~", ".")) or str(path).count("/") != 1
        if looks_local and not (expanded / "config.json").is_file():
            raise ModelMissing(key, str(path))


def data_files_exist(config: Any) -> None:
    for key in ("train_files", "val_files"):
        given = config.data[key]
        files = file_list(given) if isinstance(given, str) or hasattr(given, "__iter__") else []
        if key == "val_files" and not given and Source.of(config) is not Source.play:
            continue  # what plays nothing need not measure anything
        if not files or not all(isinstance(file, str) and file.strip() for file in files):
            raise ConfigError(f"data.{key}={given}: expected a file or a list of files, parquet or jsonl")
        for file in files:
            if not Path(file).expanduser().is_file():
                raise ConfigError(
                    f"data.{key}={file}: no such file; expected parquet or jsonl with verl's columns, or set data.columns for "
                    "files of your own"
                )
            if Path(file).suffix not in DATA_SUFFIXES:
                raise ConfigError(
                    f"data.{key}={file}: the name ends in {Path(file).suffix!r}; expected {', '.join(DATA_SUFFIXES)}"
                )


def reward_functions_exist(config: Any) -> None:
    """verl's key, and its older one at the top."""
    older = config.get("custom_reward_function") or {}
    nodes = {"reward.custom_reward_function": config.reward.custom_reward_function, "custom_reward_function": older}
    for key, node in nodes.items():
        if node and not node.path and node.name not in (None, "compute_score"):
            raise ConfigError(
                f"{key}.name={node.name}, and {key}.path is null: expected the Python file that defines it, in {key}.path"
            )
    given = {key: node.path for key, node in nodes.items() if node and node.path}
    if len(set(map(str, given.values()))) > 1:
        named = " and ".join(f"{key}.path={path}" for key, path in given.items())
        raise ConfigError(f"{named} name two reward functions; unset the second, which is verl's older key")
    for key, path in given.items():
        is_text = isinstance(path, str)
        if is_text and (path.startswith("pkg://") or Path(path.removeprefix("file://")).expanduser().is_file()):
            continue
        raise ConfigError(
            f"{key}.path={path}: {'no such file' if is_text else 'not a path'}; expected a Python file with a function "
            f"{nodes[key].name or 'compute_score'}(data_source, solution_str, ground_truth, extra_info)"
        )


def folders_can_be_written(config: Any) -> None:
    if answers_only(config):  # which writes into none of them
        return
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        if config.trainer[key] is not None:
            must_be_writable(f"trainer.{key}", config.trainer[key])
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{caches}/huggingface")
    must_be_writable("HF_DATASETS_CACHE", os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets"))


def must_be_writable(key: str, given: Any) -> None:
    wanted = Path(str(given)).expanduser().absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "is not a folder" if not there.is_dir() else "cannot be written"
        raise ConfigError(f"{key}={given}: {there} {reason}; set {key} to a folder that can be made")


def own_code_is_there(config: Any) -> None:
    file = config.data.custom_cls.path
    if file is not None and not str(file).startswith("pkg://") and not Path(str(file)).expanduser().is_file():
        raise ConfigError(f"data.custom_cls.path={file}: no such file; expected a Python file, or pkg://module")


RULES = (
    models_exist,
    data_files_exist,
    reward_functions_exist,
    folders_can_be_written,
    own_code_is_there,
)
