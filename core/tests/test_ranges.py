"""The range that stands beside a key: one check reads it wherever the key stands, and the reference shows it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attrs import field, frozen

from turnwise.config.docgen import reference
from turnwise.data.ranges import (
    BELOW_ONE,
    FINITE,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    RANGE,
    SEED,
    SHARE,
    TOP_P,
    Range,
    faults,
)

CASES: list[tuple[Range, list[float], list[float]]] = [
    (FINITE, [-1e300, 0, 7], [math.inf, -math.inf]),
    (POSITIVE, [1, 1e-300], [0, -1, math.inf]),
    (NOT_NEGATIVE, [0, 3], [-1e-9, math.inf]),
    (SHARE, [0, 0.5, 1], [-0.1, 1.1]),
    (TOP_P, [0.01, 1], [0, 1.01]),
    (BELOW_ONE, [0, 0.99], [1, -0.1]),
    (SEED, [0, 2**63 - 1], [-1, 2**63]),
]


@pytest.mark.parametrize(("bounds", "inside", "outside"), CASES)
def test_a_range_has_its_ends_and_no_infinity(bounds: Range, inside: list[float], outside: list[float]) -> None:
    assert [value for value in inside if bounds.fault(value)] == []
    assert [value for value in outside if not bounds.fault(value)] == []
    assert bounds.fault(math.inf) == "must be finite"


@frozen
class Inner:
    share: float | None = field(default=None, metadata={RANGE: SHARE})
    flag: bool = field(default=True, metadata={RANGE: POSITIVE})


@frozen
class Outer:
    count: int = field(default=1, metadata={RANGE: POSITIVE})
    folder: str | None = field(default=None, metadata={RANGE: PATH})
    inner: Inner = field(factory=Inner)
    named: dict[str, Inner] = field(factory=dict)
    several: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (Outer(), []),
        (Outer(count=0), [("count",)]),
        (Outer(folder="a/" + "b" * 256), [("folder",)]),
        (Outer(folder="ab/" * 2000), [("folder",)]),
        (Outer(inner=Inner(2.0)), [("inner", "share")]),
        (Outer(named={"x": Inner(-1.0), "y": Inner(0.5)}), [("named", "x", "share")]),
        (Outer(several=(Inner(), Inner(3.0))), [("several", 1, "share")]),
        (Outer(inner=Inner(flag=False)), []),
    ],
)
def test_every_value_is_found_with_its_path(config: Any, paths: list[Any]) -> None:
    assert [path for path, _, _ in faults(config)] == paths


@pytest.mark.parametrize(
    "row",
    [
        "| `max_steps` | int, positive | **required** |",
        "| `learning_rate` | float, at least 0 |",
        "| `top_p` | float, above 0 and at most 1 (1 switches it off) |",
        "| `max_env_failure_rate` | float, at least 0 and below 1 |",
    ],
)
def test_the_reference_shows_the_range_of_a_key(row: str) -> None:
    assert row in reference()
