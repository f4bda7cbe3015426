"""Strict conversion: what a type accepts and what it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen, validators
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.convert import structure
from turnwise.config.schema import CoefRange, RunConfig


@frozen
class Inner:
    a: int = 1


@frozen
class Everything:
    whole: int = 0
    number: float = 0.0
    flag: bool = False
    text: str = ""
    maybe: int | None = None
    either: float | CoefRange = 0.0
    texts: tuple[str, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    listed: list[int] = field(factory=list)
    abstract: Sequence[int] = ()
    unique: frozenset[str] = frozenset()
    words: str | tuple[str, ...] | None = None
    mapped: Mapping[str, int] = field(factory=dict)
    anything: Any = None
    choice: Literal["a", "b", 3] = "a"
    inner: Inner = Inner()
    inners: dict[str, Inner] = field(factory=dict)
    folder: Path = Path()
    checked: int = field(default=1, validator=validators.gt(0))


GOOD: list[tuple[str, Any, Any]] = [
    ("whole", 3, 3), ("number", 3, 3.0), ("number", 3.5, 3.5), ("flag", True, True), ("text", "8", "8"),
    ("maybe", None, None), ("maybe", 4, 4), ("either", 1, 1.0), ("either", {"start": 1, "end": 0}, CoefRange(1.0, 0.0)), ("texts", ["a"], ("a",)),
    ("pair", [1, 2], (1, 2.0)), ("listed", [1], [1]), ("abstract", [1], [1]), ("unique", ["a", "a"], frozenset({"a"})), ("words", "x", "x"),
    ("words", ["x", "y"], ("x", "y")), ("mapped", {"a": 1}, {"a": 1}), ("anything", [{"x": None}], [{"x": None}]), ("choice", "b", "b"),
    ("choice", 3, 3), ("inner", {"a": 2}, Inner(2)), ("inners", {"k": {"a": 3}}, {"k": Inner(3)}), ("folder", "x/y", Path("x/y")), ("checked", 2, 2),
]  # fmt: skip

BAD: list[tuple[str, Any, tuple[Any, ...], str]] = [
    ("whole", "8", ("whole",), "'8' is text, a whole number is needed"),
    ("whole", True, ("whole",), "True is true or false, a whole number is needed"),
    ("whole", 8.0, ("whole",), "8.0 is a number, a whole number is needed"),
    ("whole", None, ("whole",), "None is empty (null)"),
    ("number", "1e-6", ("number",), "'1e-6' is text, a number is needed"),
    ("number", True, ("number",), "a number is needed"),
    ("number", float("nan"), ("number",), "nan is not finite, a finite number is needed. Fix: "),
    ("number", float("inf"), ("number",), "inf is not finite, a finite number is needed. Fix: "),
    ("number", -float("inf"), ("number",), "-inf is not finite"),
    ("number", 10**400, ("number",), "inf is not finite"),
    ("either", float("inf"), ("either",), "inf is not finite"),
    ("flag", 1, ("flag",), "true or false is needed"),
    ("flag", "true", ("flag",), "true or false is needed"),
    ("text", 8, ("text",), "8 is a whole number, text is needed. Fix: put it in quotes"),
    ("maybe", "x", ("maybe",), "a whole number or null is needed"),
    ("either", "x", ("either",), "a number or a mapping is needed"),
    ("either", {"start": 1}, ("either", "end"), "this key is required"),
    ("texts", "a", ("texts",), "a list (text each) is needed. Fix: [a]"),
    ("texts", ["a", 1], ("texts", 1), "text is needed"),
    ("pair", [1], ("pair",), "a list of 2 is needed. Fix: write a list of 2"),
    ("listed", {"a": 1}, ("listed",), "a list (a whole number each) is needed"),
    ("words", [1], ("words", 0), "text is needed"),
    ("mapped", [1], ("mapped",), "a mapping is needed"),
    ("mapped", {"a": "x"}, ("mapped", "a"), "a whole number is needed"),
    ("choice", "c", ("choice",), "'c' is none of 'a', 'b', 3"),
    ("choice", True, ("choice",), "True is none of"),
    ("inner", 3, ("inner",), "a mapping is needed"),
    ("inner", {"b": 1}, ("inner", "b"), "unknown key 'b'. Known: a."),
    ("inners", {"k": {"a": "x"}}, ("inners", "k", "a"), "a whole number is needed"),
    ("folder", 3, ("folder",), "text is needed"),
    ("checked", 0, ("checked",), "'checked' must be > 0: 0"),
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_values_of_the_right_type_arrive_as_they_are(key: str, value: Any, expected: Any) -> None:
    made, problems = structure(Everything, {key: value})
    assert problems == []
    assert getattr(made, key) == expected
    assert type(getattr(made, key)) is type(expected)


@pytest.mark.parametrize(("key", "value", "path", "text"), BAD)
def test_nothing_is_coerced(key: str, value: Any, path: tuple[Any, ...], text: str) -> None:
    made, problems = structure(Everything, {key: value})
    assert made is None
    assert [p for p, _ in problems] == [path]
    assert text in problems[0][1]


def test_all_mistakes_of_a_class_come_together() -> None:
    bad = {key: value for key, value, _, _ in BAD if key != "checked"}
    _, problems = structure(Everything, {**bad, "unknown": 1})
    assert {path[0] for path, _ in problems} == {*bad, "unknown"}


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats()
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
)
_KEYS = st.sampled_from(["max_steps", "seed", "gamma", "exp_name", "actor_train", "custom_envs", "track_with", "x"])


@given(st.dictionaries(_KEYS, _VALUES))
def test_any_data_gives_a_run_or_problems_with_paths_into_it(data: dict[str, Any]) -> None:
    made, problems = structure(RunConfig, data)
    assert made is None  # train_env_manager, pretrain, … are required
    assert problems
    assert all(path and isinstance(text, str) and text for path, text in problems)
