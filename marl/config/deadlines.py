"""Deadlines of calls by phase: ``resources.<phase>_timeout_s``, or ``resources.timeout_s`` for all. Pure."""

import math
from enum import Enum
from typing import Any, NamedTuple


class Phase(Enum):
    start = "start"
    request = "request"
    sync = "sync"
    update = "update"
    save = "save"


class Deadline(NamedTuple):
    seconds: float
    key: str
    """The key that sets it."""


Deadlines = dict[Phase, Deadline]
NONE = Deadline(math.inf, "resources.timeout_s")


def deadlines_of(resources: Any) -> Deadlines:
    """The deadline of each phase."""
    return {phase: deadline_of(resources, phase) for phase in Phase}


def deadline_of(resources: Any, phase: Phase) -> Deadline:
    key = f"{phase.value}_timeout_s"
    chosen = key if resources[key] is not None else "timeout_s"
    return Deadline(resources[chosen], f"resources.{chosen}")


def same_for_all(seconds: float) -> Deadlines:
    """One deadline for every phase."""
    return dict.fromkeys(Phase, Deadline(seconds, "resources.timeout_s"))
