"""Composition of a run's configuration in one pass."""

import os
import re
from collections.abc import Sequence
from copy import deepcopy
from importlib.util import find_spec

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from marl.config.overrides import VERL

NAME = ("--config-name", "-cn")
OURS = f"hydra.searchpath=[{VERL}]"
"""A user's own search path may hold settings of Hydra's."""


def composed_once(words: Sequence[str], job_name: str) -> DictConfig | None:
    """The configuration of a plain run; None if the command line contains Hydra flags or settings, which ``hydra.main`` handles.

    ``hydra.main`` composes everything a first time to read ``hydra.mode``, which takes .9 s.
    """
    plain = name_and_overrides(words)
    if plain is None:
        return None
    name, overrides = plain
    with initialize_config_module("marl.configs", job_name, version_base="1.3"):
        whole = compose(name, overrides=overrides, return_hydra_config=True)
    with read_write(whole.hydra.runtime):
        OmegaConf.update(whole, "hydra.runtime.output_dir", os.getcwd())  # hydra.run.dir is "."
    HydraConfig.instance().set_config(whole)  # as hydra.main does, for ``${hydra:…}``
    config = deepcopy(whole)
    with read_write(config), open_dict(config):
        del config["hydra"]
    return config


def name_and_overrides(words: Sequence[str]) -> tuple[str, list[str]] | None:
    name, overrides, rest = "marl", [], iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        if key in NAME:
            name = value if equals else next(rest, "")
        elif word.startswith("-") or (key.lstrip("+~").startswith("hydra") and word != OURS):
            return None
        else:
            overrides.append(word.replace(VERL, verl_folder()) if word == OURS else word)
    return (name, overrides) if name else None


def verl_folder() -> str:
    """verl's configuration as a folder: Hydra would import a ``pkg://`` package, and importing verl takes seconds."""
    found = find_spec("verl")
    folder = (
        f"{found.submodule_search_locations[0]}/trainer/config" if found and found.submodule_search_locations else ""
    )
    return f"file://{folder}" if re.fullmatch(r"[\w./-]+", folder) else VERL
