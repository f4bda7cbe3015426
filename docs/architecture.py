"""Draws the core's layers from its own imports: docs/images/architecture.svg (`make docs`)."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "src" / "turnwise"
WIDTH, HEIGHT, GAP, LEFT, RIGHT = 620, 62, 26, 20, 300
INK, PAPER, LINE = "#1f2933", "#f5f7fa", "#7b8794"


def layers() -> list[list[str]]:
    """The layers from top to bottom, as the import rules name them; modules that share one stand together."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (rule,) = (one for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    return [[name.strip().removeprefix("turnwise.") for name in layer.split("|")] for layer in rule["layers"]]


def files_of(layer: str) -> list[Path]:
    """The modules of a layer."""
    folder = CORE / layer
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imports(known: list[str]) -> set[tuple[str, str]]:
    """(importing layer, imported layer), wherever in a file the import stands."""
    found = set()
    for layer in known:
        for path in files_of(layer):
            wanted = set()
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = (
                        [f"{node.module}.{a.name}" for a in node.names] if node.module == "turnwise" else [node.module]
                    )
                wanted |= {name.split(".")[1] for name in names if name.startswith("turnwise.")}
            found.update((layer, other) for other in wanted & set(known) - {layer})
    return found


def summary(layer: str) -> str:
    """The first sentence of the layer's docstring."""
    folder = CORE / layer
    text = (
        ast.get_docstring(
            ast.parse((folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text())
        )
        or ""
    )
    line = text.split("\n")[0]
    return line if len(line) <= 92 else line[: line.rfind(" ", 0, 90)] + " …"


def families() -> list[tuple[str, list[str]]]:
    """The plugins' families with their distributions."""
    found: dict[str, list[str]] = {}
    for toml in sorted(ROOT.glob("plugins/*/*/pyproject.toml")):
        found.setdefault(toml.parent.parent.name, []).append(toml.parent.name)
    return sorted(found.items())


def picture() -> str:
    """The SVG: layers as boxes, imports as lines to the right of them (all of them run down), plugin families below."""
    rows = layers()
    known = [name for row in rows for name in row]
    top = {name: 20 + i * (HEIGHT + GAP) for i, row in enumerate(rows) for name in row}
    body = []
    for i, row in enumerate(rows):
        share = WIDTH / len(row)
        for j, name in enumerate(row):
            body.append(
                _box(
                    LEFT + j * share,
                    top[name],
                    share - (4 if len(row) > 1 else 0),
                    f"turnwise.{name}",
                    summary(name),
                    len(row) > 1,
                )
            )
    lane = 0
    for lane, (upper, lower) in enumerate(sorted(imports(known), key=lambda pair: (top[pair[0]], top[pair[1]], pair))):
        body.append(_arrow(upper, lower, top[upper], top[lower], lane))
    end = 20 + len(rows) * (HEIGHT + GAP)
    for i, (family, names) in enumerate(families()):
        body.append(_box(LEFT, end + 20 + i * (HEIGHT + 8), WIDTH, f"plugins/{family}", " · ".join(names)))
    total = end + 20 + len(families()) * (HEIGHT + 8) + 10
    right = LEFT + WIDTH + 30 + lane * 9
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {total}" font-family="sans-serif"'
        ' font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _box(x: float, y: float, width: float, title: str, text: str, narrow: bool = False) -> str:
    shown = text if not narrow else ""
    return (
        f'<g><rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="4" fill="{PAPER}" stroke="{LINE}"/>'
        f'<text x="{x + 10:g}" y="{y + 24:g}" fill="{INK}" font-weight="bold">{escape(title)}</text>'
        f'<text x="{x + 10:g}" y="{y + 45:g}" fill="{INK}" font-size="11">{escape(shown)}</text></g>'
    )


def _arrow(upper: str, lower: str, start: float, end: float, lane: int) -> str:
    x, edge = LEFT + WIDTH + 14 + lane * 9, LEFT + WIDTH
    down = end > start
    colour = LINE if down else "red"  # an arrow that runs back would be seen at once
    y1, y2 = start + HEIGHT * 0.7, end + HEIGHT * 0.3
    return (
        f'<path d="M{edge} {y1:g} H{x} V{y2:g} H{edge + 5}" fill="none" stroke="{colour}" stroke-width="1">'
        f"<title>{upper} imports {lower}</title></path>"
        f'<path d="M{edge} {y2:g} l7 -3.5 v7 z" fill="{colour}"/>'
    )
