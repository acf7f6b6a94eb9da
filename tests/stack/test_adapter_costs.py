"""Cost of agents as adapters on one base: the time of a step, and memory."""

import ctypes
import gc
import shutil
import time
from statistics import median

import psutil
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from marl.quickstart.assets import Recipe, ensure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENTS = ("alice", "carol", "tom", "ann")
ONE = tuple(f"agents.{name}.policy=alice" for name in AGENTS)
"""One adapter has the tokens of all."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets") / "game"
    ensure(folder, Recipe("game", steps=1, batch=8, train_problems=256, test_problems=8), seed=0)
    return folder


@pytest.fixture
def adapted(alone, assets, tmp_path):
    """Start four agents, on an untrained model of this shape."""

    def start(hidden, layers, intermediate, vocabulary, *overrides):
        folder = tmp_path / f"model-{hidden}"
        if not folder.exists():
            shutil.copytree(assets / "model", folder)
            config = AutoConfig.from_pretrained(
                folder, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=intermediate, head_dim=hidden // 4,
                vocab_size=vocabulary, tie_word_embeddings=False,
            )  # fmt: skip
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return alone(
            f"assets={assets}", f"actor_rollout_ref.model.path={folder}", "+agents.tom={}", "+agents.ann={}",
            "sharing=lora", "actor_rollout_ref.model.lora_rank=16", *overrides, name="game",
        )  # fmt: skip

    return start


def cpu_seconds(live):
    started = time.process_time()
    live.step()
    return time.process_time() - started


def test_four_adapters_cost_what_one_does_with_equal_tokens(adapted, record_property):
    """CPU seconds of whole steps in pairs, 512 rows of a model of 5 M parameters: games, updates and syncs."""
    shape = (256, 6, 768, 512, "data.train_batch_size=16", "actor_rollout_ref.rollout.n=8")
    one, four = adapted(*shape, *ONE), adapted(*shape)
    assert [len(live.trainer.policies) for live in (one, four)] == [1, 4]
    for live in (one, four):
        live.step()
    ratios = []
    for turn in range(3):
        pair = (one, four) if turn % 2 else (four, one)
        seconds = {len(live.trainer.policies): cpu_seconds(live) for live in pair}
        ratios.append(seconds[4] / seconds[1])
    record_property("numbers", sorted(ratios))
    assert median(ratios) <= 1.15


def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss / MIB


def test_an_agent_takes_the_memory_of_its_adapter(adapted, record_property):
    """At 83 M parameters and rank 16 an adapter has 2.3 M: weights, two moments and the server's copy are 36 MB."""
    shape = (768, 10, 2048, 8192, "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2")
    adapted(64, 2, 160, 512).step()  # what is loaded the first time is nobody's
    taken, kept = [], []
    for policies in (ONE, ()):
        before = resident()
        kept.append(adapted(*shape, *policies))
        kept[-1].step()
        taken.append(resident() - before)
    each = (taken[1] - taken[0]) / 3
    record_property("numbers", [*taken, each])
    assert 25 < each <= 40, taken  # less than its own numbers would be none
