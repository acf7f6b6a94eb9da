"""The data of methods: as many examples as are asked for, and steps to use them."""

import numpy as np
import pytest
from omegaconf import OmegaConf

from marl.build_method import taken

ITEMS = [[number] for number in range(9)]


def data(**settings):
    return OmegaConf.create({"train_max_samples": -1, "shuffle": False, "seed": 5} | settings)


@pytest.mark.parametrize(("most", "expected"), [(-1, ITEMS), (3, ITEMS[:3]), (9, ITEMS), (20, ITEMS)])
def test_no_more_examples_than_asked_for(most, expected):
    assert taken(ITEMS, data(train_max_samples=most), "train_max_samples") == expected
    assert taken(ITEMS, data(train_max_samples=most), None) == ITEMS, "files that are imitated first have no such key"


def test_shuffled_data_are_cut_as_verls_are():
    expected = [ITEMS[i] for i in np.random.default_rng(5).choice(9, size=3, replace=False)]
    assert taken(ITEMS, data(train_max_samples=3, shuffle=True), "train_max_samples") == expected != ITEMS[:3]
