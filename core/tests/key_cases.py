"""What the tables of the field's keys have in common: cases as parameters, and what is expected of each kind."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.config import Loaded, to_plain
from turnwise.config.problems import at


def named(cases: list[Any]) -> list[Any]:
    """Parameters whose names are the key, numbered: a key may have several cases."""
    return [pytest.param(*case, id=f"{i}-{case[0]}") for i, case in enumerate(cases)]


def value_at(loaded: Loaded, path: str) -> Any:
    """What stands at a dotted path of the resolved configuration; `absent` where nothing does."""
    return at(to_plain(loaded.config), tuple(path.split(".")), "absent")


def translated(loaded: Loaded, key: str, target: str, value: Any) -> None:
    """The key arrived at its place here, and a note says so."""
    assert value_at(loaded, target) == value
    assert any(f"$.{key}: " in note for note in loaded.notes), loaded.notes


def unused(loaded: Loaded, key: str, reason: str) -> None:
    """A warning names the key that does not apply, with the reason."""
    assert any(f"$.{key}: " in one and reason in one for one in loaded.warnings), loaded.warnings
