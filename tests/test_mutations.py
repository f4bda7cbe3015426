"""A sample of `tests/mutated_yamls.py`, and `tests/broken_plugins.py`: no traceback, no success that is none, no hang,
lines with place and fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import broken_plugins
import mutated_values
import mutated_yamls
import pytest
from judged import run

from turnwise.plugins import reset_registry

SAMPLE = 60


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
    assert mutated_yamls.judge(mutated_yamls.Mutant(0, "none", mutated_values.BASE)) == []
    assert [code for code, *_ in (run([command, "run.yaml"]) for command in ("plan", "check"))] == [0, 0]


@pytest.mark.parametrize("kind", mutated_yamls.KINDS)
def test_mutated_configurations_are_accepted_or_refused_in_lines_with_place_and_fix(kind: str) -> None:
    mine = [mutant for mutant in mutated_yamls.mutants(600, seed=1) if mutant.kind == kind][
        : SAMPLE // len(mutated_yamls.KINDS)
    ]
    assert len(mine) == SAMPLE // len(mutated_yamls.KINDS)
    assert {(mutant.number, fault) for mutant in mine for fault in mutated_yamls.judge(mutant)} == set()


def test_there_are_eighty_broken_plugins() -> None:
    assert len({one.name for one in broken_plugins.broken()}) == len(list(broken_plugins.broken())) >= 80


@pytest.mark.parametrize("family", ["import", "hook", "record", "options", "strategy", "backend", ""])
def test_a_broken_plugin_is_a_line_that_names_it(family: str) -> None:
    families = {one.name.partition(": ")[0] for one in broken_plugins.broken()}
    named = {"import", "hook", "record", "options", "strategy", "backend"}
    mine = [
        one
        for one in broken_plugins.broken()
        if one.name.partition(": ")[0] in ({family} if family else families - named)
    ]
    assert mine
    assert {(one.name, fault) for one in mine for fault in broken_plugins.judge(one)} == set()
