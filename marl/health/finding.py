"""Findings of ``marl doctor``."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    ok = "ok"
    note = "note"
    """Something is not there that only some runs need."""
    problem = "problem"


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    said: str
    mend: str = ""
    """Empty where nothing needs mending."""


def ok(name: str, said: str) -> Finding:
    return Finding(name, State.ok, said)


def note(name: str, said: str, mend: str) -> Finding:
    return Finding(name, State.note, said, mend)


def problem(name: str, said: str, mend: str) -> Finding:
    return Finding(name, State.problem, said, mend)
