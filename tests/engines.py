"""Imports of verl's code for vLLM and SGLang on a machine without them: their modules are empty stand-ins, verl's are real."""

import sys
from contextlib import contextmanager
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

ENGINES = ("vllm", "sglang", "msgspec", "sgl_kernel")
VERL_OF_ENGINES = (
    "verl.third_party.vllm",
    "verl.utils.vllm",
    "verl.workers.rollout.vllm_rollout",
    "verl.workers.rollout.sglang_rollout",
    "marl.rollout.vllm_adapters",
    "marl.rollout.vllm_cpu",
    "marl.rollout.watched_sender",
)


class AnyName(type):
    """Stands in for a class: its attributes are there too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


def stand_in(name):
    """A class that takes any argument, and whose instances decorate by leaving things as they are."""
    return AnyName(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda self, made=None, *_, **__: made})


class StandIn(ModuleType):
    """A module in which every name is there, as a class of its own."""

    __version__ = "0.24.0"
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := stand_in(name))
        return made


class StandInFinder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ENGINES else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def forget(names):
    """Remove modules and what lies in them, and return them."""
    return {
        key: sys.modules.pop(key)
        for key in list(sys.modules)
        if any(f"{key}.".startswith(f"{name}.") for name in names)
    }


@contextmanager
def engines_importable():
    """Import verl's engine modules anew, over stand-ins for the engines; afterwards everything is as it was."""
    finder, version = StandInFinder(), metadata.version
    before = forget((*ENGINES, *VERL_OF_ENGINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "0.24.0" if name in ENGINES else version(name))
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            forget((*ENGINES, *VERL_OF_ENGINES))
            sys.modules.update(before)
