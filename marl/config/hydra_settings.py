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
from hydra.types import RunMode
from omegaconf import OmegaConf

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
    own = [word for word in read.overrides if word.startswith(("hydra", "+hydra", "~hydra")) and word != OURS]
    if not (read.config_dir or read.config_path or any(word.partition("=")[0] not in HARMLESS for word in own)):
        return
    found = detect_calling_file_or_module_from_task_function(work)
    path = create_automatic_config_search_path(*found, read.config_path or configs)
    if read.config_dir:
        path.prepend("command-line", f"file://{os.path.abspath(read.config_dir)}", SearchPathQuery(provider="schema"))
    try:
        loader = Hydra.create_main_hydra2("check", path).config_loader
        whole = loader.load_configuration(
            read.config_name or "marl", read.overrides, RunMode.MULTIRUN, validate_sweep_overrides=False
        )
    finally:
        GlobalHydra.instance().clear()
    trusted = (*trusted_modules(whole), *HYDRAS)
    for key, target in targets_in(OmegaConf.to_container(whole.hydra), "hydra.", CALLED):
        check_class(key, target, trusted)
