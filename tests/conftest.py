"""Fixtures of all tests: tiny models, made once a session, and one Ray session."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MARL_CACHE", "outputs/cache")  # of this checkout, whatever lies in the user's

import hypothesis
import pytest
import torch
import yaml

from tests import sharing
from tests.sharing import pytest_addoption, pytest_runtest_protocol  # noqa: F401 - hooks

pytest.register_assert_rewrite(
    "tests.stack.builders", "tests.stack.resumed", "tests.vllm.builders"
)  # before a test imports them: their asserts explain themselves
torch.set_num_threads(1)
yaml.SafeLoader = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # OmegaConf asks for it at each file; every test composes

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")  # the same examples every time, however loaded the machine is

IN_PROCESSES_OF_THEIR_OWN = ("test_processes", "test_examples", "test_tutorial")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """The tests that start Ray, all in one session of it; ``make test`` runs the others beside them."""
    sharing.pytest_collection_modifyitems(config, items)
    for item in items:
        if "cluster" in item.fixturenames or item.path.stem in IN_PROCESSES_OF_THEIR_OWN:
            item.add_marker(pytest.mark.ray)


def pytest_collection_finish():
    """Keep what all imports have made out of garbage collection, which would walk a million objects every few tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cold_assets(tmp_path_factory) -> Iterator[Path]:
    """The embedded task with a model that was hardly warmed up: for tests that ask how, not how well."""
    from marl.quickstart.assets import Recipe, ensure, fingerprint_of, is_made

    folder = tmp_path_factory.mktemp("assets") / "cold"
    recipe = Recipe("smudged_note", steps=30, batch=16, train_problems=64, test_problems=8)
    ensure(folder, recipe, seed=0)
    yield folder
    assert is_made(folder, fingerprint_of(recipe, seed=0)), "a test has made another model in the folder of all"


@pytest.fixture(scope="session")
def wide_assets(tmp_path_factory) -> Path:
    """The same for vLLM: a model whose heads are as wide as its kernels want them."""
    from marl.quickstart.assets import Recipe, ensure

    folder = tmp_path_factory.mktemp("assets") / "wide"
    ensure(
        folder, Recipe("split_information", steps=100, batch=32, train_problems=256, test_problems=16, heads=2), seed=0
    )
    return folder


@pytest.fixture(scope="session")
def compose_config():
    """Compose a shipped configuration with overrides, as the command line would."""
    from tests.composing import compose  # heavy: only for tests that need it

    return compose


@pytest.fixture(scope="session")
def bpe_tokenizer():
    """A byte-level tokenizer with a template like Qwen's: a system prompt of its own, text around the contents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


@pytest.fixture
def threads(request):
    """So many threads of torch, given by ``indirect`` parameters."""
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)
