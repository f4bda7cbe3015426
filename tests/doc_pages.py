"""What tests of the documentation read of its pages: their code blocks, by language or by what is in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def page_of(hook: str) -> Path:
    return DOCS / "plugins" / f"{hook.replace('_', '-')}.md"


def example_of(hook: str, folder: Path) -> str:
    """Write the example of a hook's page into `folder` under the name that its YAML uses; returns that name."""
    page = page_of(hook)
    plugins = [item for block in blocks(page, "yaml") for item in yaml.safe_load(block).get("plugins", ())]
    (name,) = {item for item in plugins if item.endswith(".py")}
    (folder / name).write_text(blocks(page, "python")[0], encoding="utf-8")
    return str(name)


def excerpt(page: Path, hooks: str) -> str:
    """The one block of a page that has this text."""
    (code,) = [block for block in blocks(page, "python") if hooks in block]
    return code


def turnwise(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in `folder`."""
    command = [sys.executable, "-m", "turnwise.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def described_metrics() -> list[str]:
    """The names between backticks of docs/metrics.md; `<…>` stands for a part that varies."""
    return re.findall(r"`([a-z]+/[^`]*)`", (DOCS / "metrics.md").read_text(encoding="utf-8"))


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins with `first`, without header and rule."""
    text = (DOCS / page).read_text(encoding="utf-8")
    body = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert body, f"no table with {first!r} in {page}"
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in body[1].splitlines()]
