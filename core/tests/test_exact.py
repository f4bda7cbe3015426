"""Episodes written and read again are the same to the last bit; what cannot be written so is refused."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.exact import decode, encode
from turnwise.data.trajectory import Sample, Trajectory, Turn, float32, int32

KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if attrs.has(type(a)):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in attrs.fields(type(a)))
    return bool(a == b)


@given(VALUES)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert same(decode(*encode(value)), value)


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([np.nan, -0.0, np.inf], np.float32), np.zeros((0, 3), bool), np.array(["a", "éß"]),
     np.float32(1 / 3), np.int64(2**60), np.bool_(True), np.zeros((4, 5, 3), np.uint8)],
)  # fmt: skip
def test_arrays_keep_dtype_shape_and_bits(array: Any) -> None:
    back = decode(*encode({"x": [array]}))["x"][0]
    assert same(back, array)
    if isinstance(back, np.ndarray):
        assert back.flags.writeable


def test_a_trajectory_and_its_samples_come_back_whole() -> None:
    turn = Turn(
        int32([1, 2]), int32([3]), np.array([True]), float32([-0.1]), int32([4]), 0.5, anchor=("s", 1, 1.0, True), observation=[{"role": "user"}],
        images=(0,), metrics={"m": float("nan")}, extras={"experts": np.full((1, 2, 2), -1, np.int16), "action": "Left"},
    )  # fmt: skip
    trajectory = Trajectory(
        "T", 3, 1, 2**70, (turn,), "length", success=None, images=(np.ones((2, 2, 3), np.uint8),), metrics={"a": 1.0}
    )
    sample = Sample(
        int32([1, 2, 3]),
        np.array([False, False, True]),
        int32([-1, -1, 0]),
        None,
        int32([-1, -1, 4]),
        (0,),
        {"c": np.zeros((3, 2))},
    )
    assert same(decode(*encode([trajectory, [sample]])), [trajectory, [sample]])


class Place(NamedTuple):
    row: int
    way: tuple[int, ...]


class Way(enum.IntEnum):
    UP = 1


class Names(frozenset[str]):
    pass


@pytest.mark.parametrize(
    "value",
    [Place(1, (2, 3)), {Place(0, ()): Way.UP}, (Place(1, ()), Way.UP), Names("ab"), OrderedDict(a=Place(2, (1,)))],
)
def test_what_derives_from_a_plain_type_comes_back_equal_to_what_it_was(value: Any) -> None:
    turn = Turn(int32([1]), int32([2]), np.array([True]), None, int32([0]), 0.0, anchor=value)
    back = decode(*encode(turn)).anchor
    assert back == value
    if not isinstance(value, dict):
        assert hash(back) == hash(value)  # it groups with the same states


def test_a_namedtuple_keeps_its_class_and_where_that_is_gone_its_name_and_fields() -> None:
    text, arrays = encode([Place(1, ()), Place(2, (Place(3, ()),))])
    assert [type(one) for one in decode(text, arrays)] == [Place, Place]
    gone = [decode(text.replace(b"test_exact", b"nowhere"), arrays) for _ in range(2)]
    (first, _), (again, _) = gone
    assert (type(first).__name__, first._fields, first) == ("Place", ("row", "way"), (1, ()))
    assert type(first) is type(again)
    assert type(first) is not Place


@pytest.mark.parametrize("fields", [["class"], ["a", "a"], [1], "ab"])
def test_a_namedtuple_that_cannot_be_is_an_error(fields: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the library words one of them)
        decode(json.dumps({"named": ["nowhere", "Some", fields, [1]]}).encode(), b"")


def test_data_that_looks_like_the_format_stays_data() -> None:
    value = {"array": ["<i4", [1], 0, 4], "dict": {"tuple": [1]}, "Turn": {}}
    assert same(decode(*encode(value)), value)


@pytest.mark.parametrize(
    ("value", "text"), [({"a": object()}, r"it\['a'\] is a object"), (np.array([None]), "array of Python objects")]
)
def test_what_cannot_be_written_exactly_is_refused(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        encode(value)


@pytest.mark.parametrize("value", [{"what": 1}, {"Turn": {"x": 1}}, {"array": ["<i4", [5], 0, 4]}, {"a": 1, "b": 2}])
def test_text_that_was_not_written_by_encode_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (numpy words one of them)
        decode(json.dumps(value).encode(), b"")
