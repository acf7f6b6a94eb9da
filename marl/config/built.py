"""Objects from sections of a configuration."""

from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf


def built(section: DictConfig) -> Any:
    """The object of a section that names its class in ``_target_``, and those within it: what verl's ``omega_conf_to_dataclass``
    returns, in a fraction of the time, since every node is read once. ``_target_`` must have been checked (``check_targets``).

    Raises what the class raises, and ``MissingMandatoryValue`` for a value that was left as ``???``.
    """
    return _built(OmegaConf.to_container(section, resolve=True, throw_on_missing=True))


def _built(value: Any) -> Any:
    if isinstance(value, list):
        return [_built(item) for item in value]
    if not isinstance(value, dict):
        return value
    values = {key: _built(item) for key, item in value.items()}
    return get_class(values.pop("_target_"))(**values) if "_target_" in values else values
