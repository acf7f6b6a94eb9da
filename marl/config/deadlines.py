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
SLOW_TOKEN_S = 0.1
NONE = Deadline(math.inf, "resources.timeout_s")


def deadlines_of(resources: Any) -> Deadlines:
    """The deadline of each phase."""
    own = {
        Phase.start: resources.start_timeout_s,
        Phase.request: resources.request_timeout_s,
        Phase.sync: resources.sync_timeout_s,
        Phase.update: resources.update_timeout_s,
        Phase.save: resources.save_timeout_s,
    }
    whole = Deadline(resources.timeout_s, "resources.timeout_s")
    return {
        phase: whole if seconds is None else Deadline(seconds, f"resources.{phase.value}_timeout_s")
        for phase, seconds in own.items()
    }


def deadline_of(resources: Any, phase: Phase) -> Deadline:
    return deadlines_of(resources)[phase]


def request_deadline(resources: Any, tokens: int) -> Deadline:
    """The time without any answer, of servers whose longest answer has so many tokens: unless the key of its own is set, it lets a
    slow server finish one."""
    known = deadline_of(resources, Phase.request)
    if resources.request_timeout_s is None and tokens * SLOW_TOKEN_S > known.seconds:
        return Deadline(tokens * SLOW_TOKEN_S, "resources.request_timeout_s")
    return known
