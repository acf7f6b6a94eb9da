"""Copies of configurations."""

import pickle
from typing import Any

from omegaconf import DictConfig, OmegaConf


def copied(config: Any) -> DictConfig:
    """A deep copy of a whole configuration: ``OmegaConf.create`` gives the same, and takes three times as long."""
    try:
        return pickle.loads(pickle.dumps(config, pickle.HIGHEST_PROTOCOL))
    except (AttributeError, TypeError, pickle.PicklingError):
        # typed by a class that cannot be imported, or holding a value of one
        return OmegaConf.create(config)
