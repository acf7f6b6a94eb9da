"""Configurations for tests, as Hydra composes them: what files say is read once for all tests that choose the same options."""

import functools
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import hydra
import omegaconf.base
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

import marl.main  # noqa: F401 - registers every option
from marl.config.overrides import hydra_overrides

# every configuration reads the same files and interpolations, each time anew: a quarter of the time of tests that compose
omegaconf.base.parse = functools.cache(omegaconf.base.parse)
LOADED: dict[tuple[str, str], bytes] = {}
Plugins.instance()  # registers the classes that read files: Hydra imports their modules a second time, by path
Packaged = SourcesRegistry.instance().resolve("pkg")
READ_PACKAGED = Packaged.load_config


def read_packaged(source: ConfigSource, config_path: str) -> ConfigResult:
    """Hydra's, of files that no test changes."""
    key = source.path, config_path
    if key not in LOADED:
        LOADED[key] = pickle.dumps(READ_PACKAGED(source, config_path))
    return pickle.loads(LOADED[key])


Packaged.load_config = read_packaged

BASES: dict[tuple, tuple[bytes, list]] = {}
"""Pickled configurations, by name and chosen options, with the options registered then: a test may register another one."""


def compose(*overrides: str, name: str = "quickstart") -> DictConfig:
    """A shipped configuration with overrides, as the command line would compose it."""
    words = hydra_overrides(overrides)
    settings = [word for word in words if is_setting(word)]
    parsed = OverridesParser.create().parse_overrides(settings)
    refused = is_mixed(words) or any(setting.is_sweep_override() for setting in parsed)
    if refused or any(word.startswith("hydra.searchpath=") for word in overrides):  # whose files a test may write again
        return composed(name, words)
    config = base(name, [word for word in words if word not in settings])
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    return config


def composed(name: str, words: list[str]) -> DictConfig:
    with hydra.initialize_config_module("marl.configs", version_base="1.3"):
        return hydra.compose(name, overrides=words)


def base(name: str, words: list[str]) -> DictConfig:
    options = list(nodes(ConfigStore.instance().repo))
    key = name, *words, *map(id, options)
    if key not in BASES:
        config = composed(name, words)
        try:
            BASES[key] = pickle.dumps(config), options
        except (AttributeError, pickle.PicklingError):  # typed by a class of a function
            return config
    config = pickle.loads(BASES[key][0])
    OmegaConf.clear_cache(config)  # each run has a stamp of its own
    return config


def nodes(group: Mapping[str, Any]) -> Iterator[Any]:
    for entry in group.values():
        if isinstance(entry, Mapping):
            yield from nodes(entry)
        else:
            yield entry


PLAIN = ("seed", "sharing", "precision", "determinism", "task", "assets", "verbose")
"""Keys of the first level that are no groups."""


def is_setting(word: str) -> bool:
    """True for ``group.key=value``, which chooses no file: Hydra sets it after it has read all of them."""
    key = word.partition("=")[0]
    return key in PLAIN or ("." in key and not set("@/:") & set(key) and not key.lstrip("+~").startswith("hydra."))


def is_mixed(words: list[str]) -> bool:
    """True where a word follows a setting that it might overwrite."""
    set_before: set[str] = set()
    for word in words:
        top = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if is_setting(word):
            set_before.add(top)
        elif top in set_before:
            return True
    return False
