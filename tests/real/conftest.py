"""SmolLM2-135M-Instruct, fetched and converted once and kept between the runs of ``make test-real``."""

import os
from pathlib import Path

import pytest
import torch

from marl.quickstart import smollm2
from marl.quickstart.tasks import SmudgedSums, rows
from tests.stack.conftest import alone  # noqa: F401 - a fixture

CACHE = Path(os.environ.get("MARL_CACHE", "outputs/cache"))


@pytest.fixture(scope="session", autouse=True)
def both_cores():
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model() -> Path:
    return smollm2.ensure(CACHE / smollm2.NAME)


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """A folder with a few rows of the second quick start's task."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("sums")
    for split, count in (("train", 16), ("test", 8)):
        table = pyarrow.Table.from_pylist(list(rows(SmudgedSums(), count, 0, split)))
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
    return folder
