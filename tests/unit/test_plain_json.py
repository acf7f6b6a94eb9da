"""JSON that orjson writes where it can: what is read is what ``json`` would have read."""

import json
import math
import uuid
from enum import Enum

import pytest
from hypothesis import given, settings, strategies as st

from marl.utils.plain_json import encoded

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


class Colour(Enum):
    red = "red"


def same(one, other):
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@settings(max_examples=50)
@given(VALUES)
def test_what_is_read_is_what_json_reads(value):
    assert same(json.loads(encoded(value)), json.loads(json.dumps(value)))
    assert same(json.loads(encoded(value, sort_keys=True)), json.loads(json.dumps(value, sort_keys=True)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**64, "\ud800", {1: 2}, (1, 2)])
def test_what_orjson_would_change_or_refuse_is_written_by_json(value):
    assert same(json.loads(encoded({"extra": [value]})), json.loads(json.dumps({"extra": [value]})))


@pytest.mark.parametrize("value", [Colour.red, uuid.UUID(int=1), {1, 2}])
def test_what_json_cannot_hold_is_refused_or_replaced(value):
    with pytest.raises(TypeError):
        encoded({"content": [value]})
    assert json.loads(encoded([value], default=str)) == [str(value)]


def test_the_order_of_keys_is_that_of_the_value_unless_sorted():
    assert encoded({"b": 1, "a": 2}) == b'{"b":1,"a":2}' and encoded({"b": 1, "a": 2}, True) == b'{"a":2,"b":1}'
