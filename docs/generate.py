"""Writes the generated parts of the documentation: the configuration reference, the table of plugins, and the picture
of the core.

`--check` changes nothing and fails if a part is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from architecture import picture

from turnwise.config.docgen import reference
from turnwise.plugins import registry

ROOT = Path(__file__).resolve().parent.parent
PAGE = """# Plugins in this repository

Generated from what the distributions register (`make docs`). Each distribution's README has its options and limits;
[plugins in general](plugins-in-general.md) tells how they are found and chosen.

{}
"""


def plugin_table() -> str:
    """All implementations of this repository's distributions, one line each."""
    ours = {p.parent.name for p in (ROOT / "plugins").glob("*/*/pyproject.toml")}
    folders = {p.parent.name: p.parent.relative_to(ROOT) for p in (ROOT / "plugins").glob("*/*/pyproject.toml")}
    lines = ["| kind | name | distribution | what it is |", "|---|---|---|---|"]
    for entry in registry().entries():
        folder = entry.distribution.removeprefix("turnwise-")
        if entry.distribution == "turnwise" or folder in ours:
            link = f"[{entry.distribution}](../{folders.get(folder, 'core')})"
            lines.append(
                f"| {entry.kind.replace('_', ' ')} | `{entry.name}` | {link} | {entry.implementation.summary} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Write what is out of date, or with `--check` name it; the exit code."""
    wanted = {
        ROOT / "docs" / "configuration.md": reference(),
        ROOT / "docs" / "plugins.md": PAGE.format(plugin_table()),
        ROOT / "docs" / "images" / "architecture.svg": picture(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date. Fix: make docs")
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
