"""Every key that docs/coming-from.md says to write here exists: in the schema, or in the options of something
installed."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from omegaconf import OmegaConf

from turnwise.config import schema
from turnwise.config.foreign.keys import RULES
from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.normalise import RewardNormalization
from turnwise.plugins import Registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("coming-from.md", "tuning.md", "troubleshooting.md")]
STRATEGY_KEYS = {"strategy_name", "strategy_config", "use", "count"}


def known() -> set[str]:
    """All keys of the schema and of the config classes of what is installed."""
    classes = [value for value in vars(schema).values() if isinstance(value, type) and attrs.has(value)]
    entries = Registry.discover().entries()
    classes += [
        GeneratingArgs,
        RewardNormalization,
        *(cls for entry in entries if (cls := entry.config_class()) is not None),
    ]
    return STRATEGY_KEYS | {a.name for cls in classes for a in attrs.fields(cls)}


def rows(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ") and "|---" not in line
    ]


def test_every_key_to_write_here_is_a_key() -> None:
    keys = {
        name.split(".")[-1].split(":")[0] for _, here, *_ in rows(PAGES[0]) for name in re.findall(r"`([^`]+)`", here)
    }
    assert len(keys) > 40
    assert sorted(keys - known()) == []


def test_every_key_that_is_translated_named_or_refused_is_on_the_page() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    keys = {rule.key.split(".")[-1].rstrip("*") for rule in RULES} - {"algorithm"}
    assert sorted(key for key in keys if not re.search(rf"\b{key}", text)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_with_a_value_is_a_key(page: Path) -> None:
    written = set(re.findall(r"`([a-z_]+): [^`]+`", page.read_text(encoding="utf-8")))
    theirs = (
        {name for cell, *_ in rows(page) for name in re.findall(r"([a-z_]+): [^`]+`", cell)}
        if page.stem == "coming-from"
        else set()
    )
    assert sorted(written - theirs - known()) == []


def test_every_example_the_pages_name_is_there() -> None:
    for page in PAGES:
        for name in re.findall(r"`(examples/[\w./]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
            if name.endswith(".yaml"):
                assert OmegaConf.load(ROOT / name)


def test_every_metric_to_look_at_here_is_a_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = {name for _, here, *_ in rows(PAGES[0]) for name in re.findall(r"(?<![\w`/])[a-z]+(?:/[a-z_]+)+", here)}
    assert {"critic/score/mean", "time/rollout", "policy/clip_frac"} <= named
    assert sorted(name for name in named if name not in page) == []
