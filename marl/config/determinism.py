"""``determinism``: what a run promises about being repeated. Pure."""

from enum import Enum
from typing import Any


class Determinism(Enum):
    """null: numbers of one machine on CPUs are repeated, and nothing is refused."""

    strict = "strict"
    """Every draw has a seed, and an operation without a deterministic form ends the run, by its name."""


def is_strict(config: Any) -> bool:
    return bool(config.determinism == Determinism.strict.value)
