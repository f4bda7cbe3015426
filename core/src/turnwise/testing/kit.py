"""The conformance kit's entry: pytest over the contract tests of one implementation."""

from __future__ import annotations

import os
from pathlib import Path

from turnwise.errors import MachineError, PluginError, did_you_mean, listed
from turnwise.hookspecs import KINDS
from turnwise.plugins import Entry, registry

CONTRACTS = Path(__file__).with_name("contracts")
FAKES = "turnwise.testing.plugin"


def run_conformance(name: str, kind: str | None = None, strict: bool = False) -> int:
    """Run the contract tests of everything that answers to `name` and return pytest's exit code (0: all passed).

    `name`: that of an implementation (or an alias), of a plugin, of a distribution, or a file `./my_env.py`. `kind`:
    only this kind.
    `strict`: a skipped test counts as failed. Raises PluginError (unknown name or kind) or MachineError (pytest is not
    installed).
    """
    try:
        import pytest
    except ImportError as error:
        raise MachineError("test-plugin needs pytest, not installed. Fix: pip install 'turnwise[testing]'") from error
    from turnwise.testing import pytest_plugin
    from turnwise.testing.subject import Subject

    entries = _chosen(name, kind)
    chosen = pytest_plugin.ConformancePlugin([Subject(entry) for entry in entries], strict)
    return int(pytest.main(_arguments(entries), plugins=[pytest_plugin, chosen]))


def _chosen(name: str, kind: str | None) -> list[Entry]:
    if kind is not None and kind not in KINDS.values():
        raise PluginError(
            f"there is no kind {kind!r}.{did_you_mean(kind, KINDS.values())} Kinds: {listed(KINDS.values())}."
        )
    registry().declare([FAKES, *([name] if name.endswith(".py") else [])], Path.cwd())
    known = registry().entries(kind)
    # A name before an alias, and both before a plugin's: the narrowest meaning wins.
    exact = [e for e in known if name == e.name] or [e for e in known if name in e.implementation.aliases]
    entries = exact or [e for e in known if name in (e.plugin, e.distribution)]
    if not entries:
        where = "" if kind is None else f" of kind {kind}"
        names = [e.name for e in known]
        raise PluginError(f"nothing{where} is named {name!r}.{did_you_mean(name, names)} Installed: {listed(names)}.")
    return entries


def _arguments(entries: list[Entry]) -> list[str]:
    """The contract files of these kinds, alone: no configuration, no conftest and no cache of the folder in which the
    user stands."""
    files = [str(CONTRACTS / f"{kind}.py") for kind in dict.fromkeys(e.kind for e in entries)]
    return [
        *files,
        "-c",
        os.devnull,
        f"--rootdir={CONTRACTS}",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-v",
        "-rs",
        "--tb=short",
        "--no-header",
    ]
