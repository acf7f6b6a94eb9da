"""The data of methods: as many examples as are asked for, and steps to use them."""

from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from marl.build_method import method_options
from marl.config.errors import ConfigError
from marl.config.sources import Source
from marl.controller.method_data import taken
from tests.composing import compose

ITEMS = [[number] for number in range(9)]


def data(**settings):
    return OmegaConf.create({"train_max_samples": -1, "shuffle": False, "seed": 5} | settings)


@pytest.mark.parametrize(("most", "expected"), [(-1, ITEMS), (3, ITEMS[:3]), (9, ITEMS), (20, ITEMS)])
def test_no_more_examples_than_asked_for(most, expected):
    assert taken(ITEMS, data(train_max_samples=most), "data.train_files") == expected
    assert taken(ITEMS, data(train_max_samples=most), "method.files") == ITEMS, (
        "files that are imitated first have no such key"
    )


def test_shuffled_data_are_cut_as_verls_are():
    expected = [ITEMS[i] for i in np.random.default_rng(5).choice(9, size=3, replace=False)]
    assert taken(ITEMS, data(train_max_samples=3, shuffle=True), "data.train_files") == expected != ITEMS[:3]


@pytest.mark.parametrize("imitated", [4, 5])
def test_imitation_leaves_steps_to_play_however_these_are_counted(imitated):
    """Four steps, by the length of the data: trainer.total_training_steps is null."""
    config = compose("method=hybrid", "method.files=[rows.jsonl]", f"method.sft_steps={imitated}")
    setup = SimpleNamespace(config=config, method=SimpleNamespace(learns=True, imitates=Source.rows))
    with pytest.raises(ConfigError, match=rf"method.sft_steps={imitated}: the run's 4 steps .* method=sft"):
        method_options(setup, {}, 4)
