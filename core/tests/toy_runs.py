"""What `turnwise check` finds in a toy run, for tests; the fixture `toy` writes its YAML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from turnwise.config.loader import load
from turnwise.config.schema import RunConfig
from turnwise.planning import device_problems
from turnwise.planning.preflight import Findings, preflight

Toy = Callable[..., Path]


def loaded(path: Path, *overrides: str) -> RunConfig:
    return load(path, overrides).config


def found(path: Path, *overrides: str, **changes: Any) -> Findings:
    return preflight(evolve(loaded(path, *overrides), **changes), path.parent)


def there_are(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As on a machine with so many GPUs."""
    monkeypatch.setattr(device_problems, "visible_gpus", lambda: count)


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


def plugin(tmp_path: Path, text: str) -> list[str]:
    """A further plugin file; the YAML's `plugins:` with it."""
    (tmp_path / "more.py").write_text("import turnwise\nfrom turnwise import Implementation\n" + text, encoding="utf-8")
    return ["turnwise.testing.plugin", "./players.py", "./more.py"]
