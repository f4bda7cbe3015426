"""`turnwise plugins` and `turnwise test-plugin`: the list, and the kit run on a name or a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_runs import Toy, turnwise

from turnwise import Implementation
from turnwise.cli import plugins as plugin_commands
from turnwise.plugins import Broken, Entry, Registry


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Two loggers of one name, an alias that is another's name, a missing package, and a broken plugin."""

    def entry(name: str, dist: str, **more: Any) -> Entry:
        return Entry("logger", Implementation(name, object, **more), dist, dist, "1.0")

    known = Registry(
        entries=[
            entry("csv", "one"), entry("csv", "two"), entry("wall", "one", requires="tw_absent", summary="paints"), entry("ink", "one"),
            entry("pen", "two", aliases=("ink",)), entry("fine", "one", aliases=("nice",)),
        ],
        broken=[Broken("torn", "turnwise-torn", "0.1", "ImportError: no x")],
    )  # fmt: skip
    monkeypatch.setattr(plugin_commands, "registry", lambda: known)
    return known


def test_the_list_shows_status_duplicates_and_what_is_broken(listing: Registry) -> None:
    got = turnwise("plugins")
    assert got.exit_code == 0
    rows = [line.split(maxsplit=4) for line in got.stdout.splitlines()]
    assert rows[0][:4] == ["kind", "name", "distribution", "version"]
    assert [(row[1], row[4]) for row in rows[1:]] == [
        ("csv", "duplicate"),
        ("csv", "duplicate"),
        ("fine", "ok"),
        ("ink", "duplicate"),
        ("pen", "duplicate"),
        ("wall", "missing: tw_absent         paints"),
        ("torn", "broken: ImportError: no x"),
    ]
    assert got.stdout.splitlines()[-1] == "plugin  torn  turnwise-torn  0.1      broken: ImportError: no x"


def test_the_list_as_json_holds_the_same_and_the_aliases(listing: Registry) -> None:
    rows = json.loads(turnwise("plugins", "--json").stdout)
    assert {row["name"]: row["status"] for row in rows}["torn"] == "broken: ImportError: no x"
    assert next(row for row in rows if row["name"] == "fine") == {
        "kind": "logger", "name": "fine", "distribution": "one", "version": "1.0", "status": "ok", "aliases": ["nice"], "summary": "",
    }  # fmt: skip


def test_an_empty_list_is_a_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_commands, "registry", Registry)
    assert turnwise("plugins").stdout == "kind  name  distribution  version  status  summary\n"
    assert turnwise("plugins", "--json").stdout == "[]\n"


def test_test_plugin_runs_the_kit_on_a_name_or_on_all_of_a_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def conformance(name: str, kind: str | None = None, strict: bool = False) -> int:
        asked.append((name, kind, strict))
        return 1 if name == "second" else 0

    monkeypatch.setattr("turnwise.testing.kit.run_conformance", conformance)
    toy()
    assert (
        turnwise(
            "test-plugin", "first", "--plugin", "./players.py", "--kind", "inference_backend", "--strict"
        ).exit_code
        == 0
    )
    Path("two.py").write_text(
        Path("players.py")
        .read_text()
        .replace('"first", First)', '"one", First), turnwise.Implementation("second", First)')
    )
    assert turnwise("test-plugin", "./two.py").exit_code == 1
    assert asked == [
        ("first", "inference_backend", True),
        ("one", "inference_backend", False),
        ("second", "inference_backend", False),
    ]


@pytest.mark.parametrize("kind", ["logger", "inference_backends"])
def test_a_file_of_which_nothing_was_tested_does_not_pass(kind: str, toy: Toy) -> None:
    toy()
    got = turnwise("test-plugin", "./players.py", "--kind", kind)
    assert got.exit_code == 2
    assert "nothing was tested" in got.stderr


def test_test_plugin_without_pytest_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "turnwise.testing.kit", None)
    got = turnwise("test-plugin", "first")
    assert (got.exit_code, got.stderr) == (
        3,
        "error: test-plugin needs pytest and hypothesis. Fix: pip install 'turnwise[testing]'.\n",
    )
