"""Classes that Hydra's own settings name: it builds callbacks and log handlers before a configuration reaches us."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import (
    create_automatic_config_search_path,
    detect_calling_file_or_module_from_task_function,
    get_args_parser,
)
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from marl.config.composing import OURS
from marl.config.targets import TARGET, check_class, targets_in, trusted_modules

CALLED = (TARGET, "()", "class")
"""Keys of ``instantiate`` and of ``logging.config.dictConfig``."""
HYDRAS = ("hydra", "hydra_plugins", "logging", "colorlog")
HARMLESS = ("hydra/sweeper", "hydra/launcher", "hydra.sweep.dir", "hydra.run.dir", "hydra.mode", "hydra.job.name")


def check_hydra_settings(words: Sequence[str], work: Callable[..., Any], configs: str) -> None:
    """Raise ConfigError for a class of an untrusted module under ``hydra`` of what this command line composes for ``work``; our
    own files are not read again for it."""
    read, _ = get_args_parser().parse_known_args(words)
    own = [word.partition("=")[0].lstrip("+~") for word in read.overrides if word != OURS]
    if not (read.config_dir or read.config_path or any(key.startswith("hydra") and key not in HARMLESS for key in own)):
        return
    found = detect_calling_file_or_module_from_task_function(work)
    path = create_automatic_config_search_path(*found, read.config_path or configs)
    if read.config_dir:
        path.prepend("command-line", f"file://{os.path.abspath(read.config_dir)}", SearchPathQuery(provider="schema"))
    before = HydraConfig.instance().cfg
    try:
        loader = Hydra.create_main_hydra2("check", path).config_loader
        whole = loader.load_configuration(
            read.config_name or "marl", read.overrides, RunMode.MULTIRUN, validate_sweep_overrides=False
        )
        HydraConfig.instance().set_config(whole)  # for ``${hydra:…}``
        settings = resolved(whole.hydra)
    finally:
        HydraConfig.instance().cfg = before
        GlobalHydra.instance().clear()
    trusted = (*trusted_modules(whole), *HYDRAS)
    for key, target in targets_in(settings, "hydra.", CALLED):
        check_class(key, target, trusted)


def resolved(node: Any) -> Any:
    """A configuration as plain containers, groups that are named by interpolation included; None for what nobody knows yet."""
    if isinstance(node, DictConfig):
        return {key: resolved(known(node, key)) for key in node}
    return [resolved(known(node, at)) for at in range(len(node))] if isinstance(node, ListConfig) else node


def known(node: DictConfig | ListConfig, key: Any) -> Any:
    try:
        return node[key]
    except OmegaConfBaseException:
        return None
