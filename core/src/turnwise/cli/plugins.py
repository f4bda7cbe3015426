"""`turnwise plugins` and `turnwise test-plugin`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from turnwise.errors import MachineError, PluginError, listed
from turnwise.plugins import registry


def show(as_json: bool) -> None:
    """Print every implementation and every broken plugin. Plain text: a table library would cost more than the
    listing."""
    known = registry()
    names = Counter((e.kind, name) for e in known.entries() for name in set(e.names))
    rows: list[dict[str, Any]] = [
        {
            "kind": e.kind,
            "name": e.name,
            "distribution": e.distribution,
            "version": e.version,
            "status": "duplicate" if any(names[e.kind, name] > 1 for name in e.names) else e.status,
            "aliases": list(e.implementation.aliases),
            "summary": e.implementation.summary,
        }
        for e in known.entries()
    ]
    rows += [
        {
            "kind": "plugin",
            "name": b.plugin,
            "distribution": b.distribution,
            "version": b.version,
            "status": f"broken: {b.why}",
            "aliases": [],
            "summary": "",
        }
        for b in known.broken
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    columns = ("kind", "name", "distribution", "version", "status", "summary")
    widths = {c: max([len(c), *(len(str(r[c])) for r in rows)]) for c in columns}
    for row in [{c: c for c in columns}, *rows]:
        click.echo("  ".join(str(row[c]).ljust(widths[c]) for c in columns).rstrip())


def test(name: str, kind: str | None, declared: tuple[str, ...], strict: bool) -> int:
    """Run the conformance kit; the exit code is pytest's. Raises PluginError where a file adds nothing to test."""
    try:
        from turnwise.testing.kit import run_conformance
    except ImportError as error:
        raise MachineError("test-plugin needs pytest and hypothesis. Fix: pip install 'turnwise[testing]'.") from error
    known = registry()
    before = {(e.kind, e.name) for e in known.entries()}
    known.declare(declared, Path())
    if not name.endswith(".py"):
        return run_conformance(name, kind, strict)
    known.declare([name], Path())
    # What was installed before is not this file's.
    fresh = [e for e in known.entries() if (e.kind, e.name) not in before]
    chosen = [e for e in fresh if kind in (None, e.kind)]
    if not chosen:
        # Exit code 0 would tell a CI that a misspelt --kind has passed.
        what = "no implementation" if kind is None else f"no {kind!r}"
        raise PluginError(
            f"{name} adds {what}: nothing was tested. Fix: one of the kinds that it adds: {listed({e.kind for e in fresh})}."
        )
    return max(run_conformance(e.name, e.kind, strict) for e in chosen)
