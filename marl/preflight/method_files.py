"""Checks of the files that a method reads in place of tasks."""

from omegaconf import OmegaConf

from marl.config.dataset_rows import file_list
from marl.config.errors import ConfigError
from marl.config.sources import Source
from marl.controller.method_data import read_items, speakers_of
from marl.run_setup import Setup


def check_examples(setup: Setup) -> None:
    """Raise ConfigError for files that a method cannot read, or learns nothing from."""
    config, method = setup.config, setup.method
    keys = ("method.files",) if method.imitates is not None else ("data.train_files", "data.val_files")
    for key in keys:
        files = file_list(OmegaConf.select(config, key))
        items = read_items(method, method.imitates or Source.of(config), files, speakers_of(config), key)
        if key != "data.val_files" and len(items) < config.data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={config.data.train_batch_size}: {key} give {len(items)} examples; expected at least one "
                "batch, use a smaller batch or more data"
            )
