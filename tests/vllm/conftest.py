"""Runs on vLLM's servers, on this machine's CPUs."""

from importlib.util import find_spec

import pytest

from tests.vllm.builders import SETTINGS, running


@pytest.fixture(scope="session", autouse=True)
def machine():
    """A machine without vLLM fails: a skipped proof would pass for one."""
    assert find_spec("vllm"), "vLLM is not installed; run make test-vllm, which makes an environment with it"


@pytest.fixture(scope="module")
def start(compose_config, wide_assets, tmp_path_factory):
    """A context in which a run is up: ``with start(overrides…) as live``."""

    def start(*overrides, **options):
        folder = tmp_path_factory.mktemp("run")
        words = (f"assets={wide_assets}", f"trainer.default_local_dir={folder}", *SETTINGS, *overrides)
        return running(compose_config(*words, name="split_information"), **options)

    return start
