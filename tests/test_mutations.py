"""A sample of `tests/mutated_yamls.py`, and `tests/broken_plugins.py`: no traceback, no success that is none, no hang,
lines with place and fix."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnwise.plugins import reset_registry

SAMPLE = 60


def script(name: str) -> ModuleType:
    """A script beside this file."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


YAMLS: Any = script("mutated_yamls")
PLUGINS: Any = script("broken_plugins")


@pytest.fixture(autouse=True)
def _folder_and_registry_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    reset_registry()
    for name in set(sys.modules) - before:
        if name.startswith("turnwise_file_"):
            del sys.modules[name]


def test_the_configuration_that_is_mutated_is_fine() -> None:
    assert YAMLS.judge(YAMLS.Mutant(0, "none", YAMLS.BASE)) == []
    assert [code for code, *_ in (YAMLS.run([command, "run.yaml"]) for command in ("plan", "check"))] == [0, 0]


@pytest.mark.parametrize("kind", YAMLS.KINDS)
def test_mutated_configurations_are_accepted_or_refused_in_lines_with_place_and_fix(kind: str) -> None:
    mine = [mutant for mutant in YAMLS.mutants(600, seed=1) if mutant.kind == kind][: SAMPLE // len(YAMLS.KINDS)]
    assert len(mine) == SAMPLE // len(YAMLS.KINDS)
    assert {(mutant.number, fault) for mutant in mine for fault in YAMLS.judge(mutant)} == set()


def test_there_are_eighty_broken_plugins() -> None:
    assert len({one.name for one in PLUGINS.broken()}) == len(list(PLUGINS.broken())) >= 80


@pytest.mark.parametrize("family", ["import", "hook", "record", "options", "strategy", "backend", ""])
def test_a_broken_plugin_is_a_line_that_names_it(family: str) -> None:
    families = {one.name.partition(": ")[0] for one in PLUGINS.broken()}
    named = {"import", "hook", "record", "options", "strategy", "backend"}
    mine = [
        one for one in PLUGINS.broken() if one.name.partition(": ")[0] in ({family} if family else families - named)
    ]
    assert mine
    assert {(one.name, fault) for one in mine for fault in PLUGINS.judge(one, YAMLS)} == set()
