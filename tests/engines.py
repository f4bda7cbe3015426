"""Runs the tests of the real engines and prints what ran: `python tests/engines.py [--short] [pytest's arguments]`.

An engine that cannot be imported is a failure of the installation, not a skipped test. `--short` leaves out the tests
marked `matrix`, as CI does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = {"vllm": "vllm", "deepspeed": "deepspeed", "megatron": "megatron.core", "ray": "ray"}
"""Engine → the module of this interpreter that must import."""


def versions() -> dict[str, str]:
    """Engine → its version. Ends the program where one is missing."""
    found = {}
    for engine, module in HERE.items():
        # A process of its own: importing an engine may patch torch.
        code = f"import {module} as m; print(getattr(m, '__version__', '?'))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
        )
        if done.returncode:
            sys.exit(
                f"{engine} cannot be imported in {sys.executable}: {done.stderr.strip().splitlines()[-1]}. Fix: make"
                " setup-engines"
            )
        found[engine] = done.stdout.strip().splitlines()[-1]
    interpreter = os.environ.get("TURNWISE_SGLANG_PYTHON", "")
    code = "from importlib import metadata; print(metadata.version('sglang'))"
    done = subprocess.run([interpreter or sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"sglang is not installed in TURNWISE_SGLANG_PYTHON={interpreter or 'unset'}. Fix: make setup-engines")
    return found | {"sglang": done.stdout.strip()}


class Counted:
    """A pytest plugin: outcomes by the distribution that a test belongs to, and the reasons of what was skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, set[str]] = defaultdict(set)
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by what ended it before."""
        name = self._distribution(report.nodeid)
        self.seconds[name] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name][report.outcome] += 1
            if report.skipped:
                self.reasons[name].add(
                    re.sub(
                        r"^Skipped: ",
                        "",
                        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr),
                    )
                )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that was skipped or broke as a whole."""
        if report.outcome != "passed":
            name = self._distribution(report.nodeid)
            self.outcomes[name][report.outcome] += 1
            self.reasons[name].add(
                str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
                .strip()
                .splitlines()[-1]
            )

    @staticmethod
    def _distribution(nodeid: str) -> str:
        found = re.match(r"plugins/[^/]+/([^/]+)/|tests/test_readmes\.py::.*\[(\w+)\]", nodeid)
        return found[1] or found[2] if found else "whole runs"


def main() -> None:
    arguments = sys.argv[1:]
    which = "engines and not matrix" if "--short" in arguments else "engines or matrix"
    installed = versions()
    os.chdir(ROOT)
    counted = Counted()
    chosen = [a for a in arguments if a != "--short"]
    code = pytest.main(["-m", which, "--timeout", "600", "-n", "2", "--dist", "loadfile", *chosen], plugins=[counted])
    print(f"\n{'engine':<12} {'version':<12} {'passed':>8}{'failed':>8}{'skipped':>8} {'seconds':>8}  skipped because")
    for name in sorted({*installed, *counted.outcomes}):
        outcome, why = counted.outcomes[name], "; ".join(sorted(counted.reasons[name]))
        version = installed.get(name) or _version(f"turnwise-{name}")
        numbers = "".join(f"{outcome[kind]:>8}" for kind in ("passed", "failed", "skipped"))
        print(f"{name:<12} {version:<12} {numbers} {counted.seconds[name]:>8.0f}  {why[:200]}")
    untested = [name for name in installed if not counted.outcomes[name]["passed"] and not chosen]
    if untested:
        sys.exit(f"no test of {', '.join(untested)} passed")
    sys.exit(int(code))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
