"""JSON as the ``json`` module reads and writes it, written by orjson where both mean the same: a turn is encoded in a tenth of
the time."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import orjson

SIMPLE = frozenset({str, int, bool, type(None)})
STRINGS = frozenset({str})


def encoded(value: Any, sort_keys: bool = False, default: Callable[[Any], Any] | None = None) -> bytes:
    """Equal values give equal bytes. Raises TypeError or ValueError for what JSON cannot hold, unless ``default`` replaces it."""
    if is_plain(value):
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else 0)
        except TypeError:  # a long integer, or half of a pair of surrogates
            pass
    return json.dumps(value, sort_keys=sort_keys, default=default).encode()


def is_plain(value: Any) -> bool:
    """True for what orjson and ``json`` write alike: it would make null of NaN, and texts of dates and enumerations."""
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= STRINGS and are_plain(value.values())
    if kind is list:
        return are_plain(value)
    return kind in SIMPLE or (kind is float and math.isfinite(value))


def are_plain(values: Iterable[Any]) -> bool:
    for value in values:  # noqa: SIM110 - a generator expression takes twice as long
        if type(value) not in SIMPLE and not is_plain(value):
            return False
    return True
