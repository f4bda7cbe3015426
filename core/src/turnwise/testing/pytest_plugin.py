"""The pytest side of the kit: contract tests run over the chosen implementations, and in strict mode a skip is a
failure."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from turnwise.testing.subject import Subject


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all contract tests, as in a run."""
    with asyncio.Runner() as shared:
        yield shared


@pytest.fixture(scope="session")
def subjects(request: pytest.FixtureRequest) -> list[Subject]:
    """Everything under test."""
    plugins = request.config.pluginmanager.get_plugins()
    return next(plugin.subjects for plugin in plugins if isinstance(plugin, ConformancePlugin))


class ConformancePlugin:
    """Gives contract tests `implementation`: one test per subject of the file's kind."""

    def __init__(self, subjects: list[Subject], strict: bool) -> None:
        self.subjects = subjects
        self._strict = strict

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per implementation; one that lacks a package is skipped."""
        if "implementation" in metafunc.fixturenames:
            mine = [subject for subject in self.subjects if subject.entry.kind == metafunc.module.KIND]
            metafunc.parametrize("implementation", [_parameter(subject) for subject in mine])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """In strict mode, fail what was skipped and keep the reason."""
        report = yield
        if self._strict and report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            report.outcome, report.longrepr = "failed", f"--strict: {reason}"
        return report


def _parameter(subject: Subject) -> Any:
    missing = subject.entry.missing
    marks = [pytest.mark.skip(reason=f"{subject!r} needs {', '.join(missing)}, not installed")] if missing else []
    return pytest.param(subject, marks=marks, id=subject.entry.name)
