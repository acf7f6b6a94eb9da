"""Rules about the numbers that trainer and servers compute in."""

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.precision import OF_CRITICS, OF_POLICIES, SERVER_DTYPES, dtype_name
from marl.utils.registry import did_you_mean


def precision_is_known(config: Any) -> None:
    precision = config.precision
    if precision is not None and precision not in SERVER_DTYPES:
        raise ConfigError(
            f"precision={precision}: expected {', '.join(SERVER_DTYPES)}, or null for verl's own keys."
            f"{did_you_mean(str(precision), SERVER_DTYPES)}"
        )


def policies_have_the_precision(config: Any) -> None:
    must_agree(config, OF_POLICIES)


def critics_have_the_precision(config: Any) -> None:
    must_agree(config, OF_CRITICS)


def must_agree(config: Any, keys: Sequence[str]) -> None:
    """Raise ConfigError for the first of verl's keys that contradicts ``precision``."""
    precision = config.precision
    for key in keys if precision in SERVER_DTYPES else ():
        value = OmegaConf.select(config, key)
        if dtype_name(value) != dtype_name(precision):
            raise ConfigError(
                f"{key}={value}: precision={precision} sets it, for trainer, critics and servers alike; leave it out, or set "
                "precision=null to choose each of verl's keys"
            )


RULES = (precision_is_known, policies_have_the_precision, critics_have_the_precision)
