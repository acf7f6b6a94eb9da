"""Bounds of numbers, declared with the dataclass fields they apply to. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from marl.types import LARGEST_SCORE

FOREVER = 1e7
"""Upper limit of any deadline in seconds, a third of a year: timers accept no more."""


@dataclass(frozen=True)
class Number:
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False
    """``low`` itself is excluded."""
    null: bool = False
    optional: bool = False
    """Not every configuration has the key."""
    also: float | str | None = None
    """One value outside the range, such as -1 for none."""
    expected: str = ""
    """Used in the error instead of the range."""

    def takes(self, value: Any) -> bool:
        if value is None:
            return self.null
        if isinstance(value, str):
            return value == self.also
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        if self.also is not None and value == self.also:
            return True
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)

    def or_null(self) -> "Number":
        return replace(self, null=True)

    def __str__(self) -> str:
        if self.expected:
            return self.expected
        low = [f"{'above' if self.above else 'at least'} {self.low:.9g}"] if self.low > -math.inf else []
        high = [f"at most {self.high:.9g}"] if self.high < math.inf else []
        others = [f"or {self.also}"] if self.also is not None else []
        others += ["or null"] if self.null else []
        kind = "a whole number" if self.whole else "a finite number"
        return ", ".join([" ".join(["expected", kind, " and ".join(low + high)]).strip(), *others])


def count(low: int = 1, high: int = 2**31 - 1, **options: Any) -> Number:
    return Number(low, high, whole=True, **options)


FINITE = Number()
"""Any finite number: for a field without a bound, or with a rule that is more specific."""
WHOLE = Number(whole=True)
SCORE = Number(-LARGEST_SCORE, LARGEST_SCORE)
SHARE = Number(0, 1)
POSITIVE = Number(0, above=True)
SECONDS = Number(0, FOREVER, above=True)
TOKENS = count(1, 2**26)
TEMPERATURE = Number(0, 100)
LEAST_TEMPERATURE = 1e-5
"""A lower temperature is greedy, as in vLLM: scores divided by it would overflow."""
TOP_P = Number(0, 1, above=True)
TOP_K = count(1, also=-1)


def bounded(default: Any, number: Number) -> Any:
    """A dataclass field with a default and a bound: ``laps: int = bounded(1, count())``."""
    return field(default=default, metadata={"bound": number})


def bounds_of(config: type) -> dict[str, Number]:
    """The bound of each field that has one. A subclass that gives a field another default keeps its parent's bound."""
    return {
        option.name: option.metadata["bound"]
        for cls in reversed(config.__mro__)
        if is_dataclass(cls)
        for option in fields(cls)
        if "bound" in option.metadata
    }


@cache
def plain_lists(config: type) -> frozenset[str]:
    """Names of a dataclass' fields that are lists of words, numbers or choices."""
    lists = (
        (name, get_args(option))
        for name, hint in get_type_hints(config).items()
        for option in (hint, *get_args(hint))  # one that may be null is a union
        if get_origin(option) is list
    )
    return frozenset(
        name for name, (item,) in lists if isinstance(item, type) and issubclass(item, (str, int, float, Enum))
    )


def out_of_bounds(node: Any, key: str) -> Iterator[str]:
    """A message for each field of a typed OmegaConf node, or of one inside it, that is out of bounds, and for each list of plain
    values that holds a list or a group, which OmegaConf takes; ``key`` is the node's path in the configuration."""
    if OmegaConf.is_list(node):
        for index, inner in enumerate(node):
            yield from out_of_bounds(inner, f"{key}[{index}]")
    if not OmegaConf.is_dict(node):
        return
    kind = OmegaConf.get_type(node)
    numbers, plain = (bounds_of(kind), plain_lists(kind)) if is_dataclass(kind) else ({}, frozenset())
    for name, value in node.items():
        if name in numbers and not numbers[name].takes(value):
            yield f"{key}.{name}={value}: {numbers[name]}"
        if name in plain and OmegaConf.is_list(value) and any(OmegaConf.is_config(item) for item in value):
            yield f"{key}.{name}={value}: expected a list of plain values, as in {key}.{name}=[a,b]"
        yield from out_of_bounds(value, f"{key}.{name}")


def is_due(frequency: int, step: int) -> bool:
    """True if something done every ``frequency`` steps is due at this one; never if that is 0 or less."""
    return frequency > 0 and step % frequency == 0
