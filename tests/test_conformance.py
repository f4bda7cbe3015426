"""Every implementation of this repository keeps the contract of its kind: the conformance kit over all distributions,
skips failing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from turnwise.plugins import registry

ROOT = Path(__file__).resolve().parent.parent


SERVED = {"turnwise-sglang"}
"""Whose engine lives in another interpreter, which no `requires` can look for."""


def runs(distribution: str) -> bool:
    """Whether something in it can run here; the engines' own tests run the kit where they are installed."""
    return (
        any(e.distribution == distribution and not e.missing for e in registry().entries())
        and distribution not in SERVED
    )


NAMES = [
    "local",
    *(
        name
        for p in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))
        if runs(name := tomllib.loads(p.read_text(encoding="utf-8"))["project"]["name"])
    ),
]
KIT = """
import json, sys
from turnwise.errors import TurnwiseError
from turnwise.testing.kit import run_conformance

def code(name):
    try:
        return run_conformance(name, strict=True)
    except TurnwiseError as error:
        return str(error)

print(json.dumps({name: code(name) for name in sys.argv[1:]}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The kit over everything, in one process: torch is imported once."""
    command = [sys.executable, "-c", KIT, *NAMES]
    return subprocess.run(
        command,
        cwd=tmp_path_factory.mktemp("kit"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_conformance_kit_passes_without_a_skip(kit: subprocess.CompletedProcess[str], name: str) -> None:
    codes = json.loads(kit.stderr.splitlines()[-1])
    assert codes[name] == 0, kit.stdout
