"""The documentation is true: its YAML parses, its links lead somewhere, its numbers and metric names are the code's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from doc_pages import DOCS, ROOT, blocks, described_metrics, page_of, table

from turnwise.contracts.batch_adjust import AdjustContext
from turnwise.hookspecs import KINDS
from turnwise.pipeline.aggregation import token_coefficients
from turnwise.pipeline.metrics import DISCARDED
from turnwise.planning.schedules import Schedule, learning_rate
from turnwise.plugins import Registry, registry

PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("plugins/*/*/README.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
)
CORE = ROOT / "core" / "src" / "turnwise"
METRIC = re.compile(r"^(correction|critic|policy|rollout|tokens|tps|group|env|val|system|time)/")


def literal_metrics(source: str) -> Iterator[str]:
    """Metric names in a source file, `<…>` for what is put in: literals, phases that are timed, per-token names of the
    objective."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.match(node.value):
            yield from (
                [node.value] if not node.value.endswith("/") else []
            )  # a piece of an f-string, which comes whole below
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
            if METRIC.match(text):
                yield text
    yield from (f"time/{name}" for name in re.findall(r'\.phase\("(\w+)"\)', source))
    yield from (f"policy/{name}" for name in re.findall(r'shown\["(\w+)"\]', source))
    yield from (
        f"policy/{name}"
        for table in re.findall(r"shown = \{(.*?)\*\*", source)
        for name in re.findall(r'"(\w+)":', table)
    )
    counts = re.findall(r'counts\["(\w+)"\] ', source)
    yield from (f"{'async' if name == DISCARDED else 'rollout'}/{name}" for name in counts)


@pytest.mark.parametrize(
    "path",
    [
        CORE / "pipeline" / "metrics.py",
        CORE / "pipeline" / "correction.py",
        CORE / "pipeline" / "evaluation.py",
        CORE / "pipeline" / "learner.py",
        CORE / "pipeline" / "loop.py",
        CORE / "pipeline" / "saving.py",
        CORE / "rollout" / "scheduler.py",
        ROOT / "plugins" / "strategies" / "torch" / "src" / "turnwise_torch" / "objective.py",
        ROOT / "plugins" / "strategies" / "torch" / "src" / "turnwise_torch" / "device.py",
    ],
    ids=lambda path: path.name,
)
def test_every_metric_name_in_the_sources_is_described(path: Path) -> None:
    patterns = {re.sub(r"<[^>]*>", "<>", name) for name in described_metrics()}
    varying = {"<>/<>", "env/<>/<>", "val/<>/<>", "val/<>", "rollout/<>", "time/<>", "policy/<>"}
    found = set(literal_metrics(path.read_text(encoding="utf-8"))) - varying
    assert found, f"no metric name was found in {path.name}."
    assert sorted(found - patterns) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_blocks_parse_and_links_lead_somewhere(page: Path) -> None:
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict), block
    for block in blocks(page, "python"):
        ast.parse(block)
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{link} leads nowhere."
        if anchor:
            titles = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], (
                f"{link}: no such section."
            )


def test_every_implementation_of_the_repository_is_named_on_its_page() -> None:
    ours = {"turnwise"} | {f"turnwise-{path.parent.name}" for path in (ROOT / "plugins").glob("*/*/pyproject.toml")}
    hooks = {kind: hook for hook, kind in KINDS.items()}
    entries = [entry for entry in Registry.discover().entries() if entry.distribution in ours]
    assert ours - {entry.distribution for entry in entries} == {
        "turnwise-serving"
    }  # a library: it brings no implementation
    shipped = {hook: page_of(hook).read_text(encoding="utf-8").partition("\nShipped: ")[2] for hook in KINDS}
    assert [f"{e.kind} {e.name}" for e in entries if f"`{e.name}`" not in shipped[hooks[e.kind]]] == []


def test_every_page_is_in_the_index() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    missing = [
        str(p.relative_to(DOCS))
        for p in DOCS.rglob("*.md")
        if p.name != "index.md" and f"({p.relative_to(DOCS)})" not in text
    ]
    assert missing == []


def test_the_table_of_updates_is_the_policies_own() -> None:
    for name, *cells in table("batches-and-rates.md", "batch_adjust_mode"):
        policy = registry().build("batch_adjust", name, None, AdjustContext(unit=16, rollout_batch_size=64))
        assert [policy.updates(n) for n in (10, 64, 100, 250)] == [int(cell) for cell in cells], name


def test_the_table_of_rates_is_the_schedules_own() -> None:
    schedules = (
        Schedule("linear", 10),
        Schedule("cosine", 10),
        Schedule("cosine_with_min_lr", 10, {"min_lr_rate": 0.1}),
        Schedule("wsd", 10, {"num_decay_steps": 50}),
    )
    for step, update, count, *cells in table("batches-and-rates.md", "p"):
        rates = [f"{learning_rate(1e-6, s, int(step), int(update), int(count), 200):.3g}" for s in schedules]
        assert rates == cells, (step, update, count)


def test_the_table_of_aggregation_is_the_code_s_own() -> None:
    losses = [np.array([1.0, 2.0]), np.array([3.0, 1.0, 2.0, 2.0]), np.array([4.0, 0.0, 2.0])]
    lengths, owner = np.array([2, 4, 3]), np.array([0, 0, 1])
    for mode, _, *cells in table("batches-and-rates.md", "loss_agg_mode"):
        for unit, cell in zip(("trajectory", "sample"), cells, strict=True):
            coef = token_coefficients(mode, unit, np.arange(3), owner, np.ones(3), lengths, scale=8.0)
            assert f"{sum(c * row.sum() for c, row in zip(coef, losses, strict=True)):.4f}" == cell, (mode, unit)


def test_every_arrow_of_the_architecture_runs_down() -> None:
    picture = (DOCS / "images" / "architecture.svg").read_text()
    assert "turnwise.pipeline" in picture
    assert 'stroke="red"' not in picture
