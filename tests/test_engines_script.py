"""The script behind `make test-engines`: an engine that is missing is a failure, and what ran is counted by its
distribution."""

from __future__ import annotations

from types import SimpleNamespace

import engines as script
import pytest


def test_an_engine_that_cannot_be_imported_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "HERE", {"warp": "no_such_engine"})
    with pytest.raises(
        SystemExit, match=r"warp cannot be imported in .*No module named 'no_such_engine'. Fix: make setup-engines"
    ):
        script.versions()


def test_an_interpreter_without_sglang_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "HERE", {})
    monkeypatch.setenv("TURNWISE_SGLANG_PYTHON", "/usr/bin/env false")
    monkeypatch.setattr(
        script.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1, stdout="", stderr="")
    )
    with pytest.raises(
        SystemExit, match=r"sglang is not installed in TURNWISE_SGLANG_PYTHON=.*Fix: make setup-engines"
    ):
        script.versions()


@pytest.mark.parametrize(
    ("given", "chosen", "rest"), [([], "engines or matrix", []), (["--short", "-x"], "engines and not matrix", ["-x"])]
)
def test_all_tests_run_but_for_ci_the_short_ones(
    monkeypatch: pytest.MonkeyPatch, given: list[str], chosen: str, rest: list[str]
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(script, "versions", dict)
    monkeypatch.setattr(script.sys, "argv", ["engines.py", *given])
    monkeypatch.setattr(script.os, "chdir", lambda folder: None)
    monkeypatch.setattr(script.pytest, "main", lambda arguments, plugins: seen.append(arguments) or 0)
    with pytest.raises(SystemExit, match="0"):
        script.main()
    (arguments,) = seen
    assert arguments[:2] == ["-m", chosen]
    assert arguments[8:] == rest


def test_outcomes_are_counted_by_distribution() -> None:
    counted = script.Counted()
    places = (
        "plugins/strategies/vllm/tests/test_a.py::test_b",
        "tests/test_readmes.py::test_runs[ray]",
        "tests/test_x.py::test_y",
    )
    for place in places:
        for when in ("setup", "call", "teardown"):
            counted.pytest_runtest_logreport(
                SimpleNamespace(nodeid=place, when=when, outcome="passed", skipped=False, duration=1.0)
            )
    failed = SimpleNamespace(nodeid=places[0], when="setup", outcome="failed", skipped=False, duration=0.0)
    counted.pytest_runtest_logreport(failed)
    skipped = SimpleNamespace(
        nodeid=places[0],
        when="setup",
        outcome="skipped",
        skipped=True,
        duration=0.0,
        longrepr=("f", 1, "Skipped: no engine"),
    )
    counted.pytest_runtest_logreport(skipped)
    assert counted.outcomes == {
        "vllm": {"passed": 1, "failed": 1, "skipped": 1},
        "ray": {"passed": 1},
        "whole runs": {"passed": 1},
    }
    assert counted.reasons == {"vllm": {"no engine"}}
    assert counted.seconds["ray"] == 3.0
