"""What `turnwise check` finds in a toy run, for tests; the fixture `toy` writes its YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from turnwise.config.loader import load
from turnwise.config.schema import RunConfig
from turnwise.planning import device_problems
from turnwise.planning.preflight import Findings, preflight

Toy = Callable[..., Path]


def loaded(path: Path, *overrides: str) -> RunConfig:
    return load(path, overrides).config


def found(path: Path, *overrides: str, **changes: Any) -> Findings:
    return preflight(evolve(loaded(path, *overrides), **changes), path.parent)


def there_are(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As on a machine with so many GPUs."""
    monkeypatch.setattr(device_problems, "visible_gpus", lambda: count)


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


def plugin(tmp_path: Path, text: str) -> list[str]:
    """A further plugin file; the YAML's `plugins:` with it."""
    (tmp_path / "more.py").write_text("import turnwise\nfrom turnwise import Implementation\n" + text, encoding="utf-8")
    return ["turnwise.testing.plugin", "./players.py", "./more.py"]


def runtimes(capabilities: Mapping[str, str], more: str = "") -> str:
    """Lines of a plugin file: a runtime of each name, with these arguments of RuntimeCapabilities and one option of its
    own; `more`: further records."""
    classes = "".join(
        f"""
@frozen
class {name}_options:
    width: int = 3
    capabilities = RuntimeCapabilities({arguments})


class {name}_runtime(FakeRuntime):
    pass
"""
        for name, arguments in capabilities.items()
    )
    records = ", ".join(
        [f"Implementation({name!r}, {name}_runtime, config={name}_options)" for name in capabilities]
        + [more] * bool(more)
    )
    return f"""
from attrs import frozen
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.testing.fakes import FakeRuntime
{classes}

@turnwise.hookimpl
def runtimes():
    return [{records}]
"""


PAIRED = """
from attrs import frozen
from turnwise.contracts.inference import BackendCapabilities
from turnwise.testing.fakes import FakeBackend


@frozen
class Pairs:
    server: str = ""

    @property
    def capabilities(self):
        return BackendCapabilities(attached=bool(self.server), data_parallel_size=self.data_parallel_size)

    def data_parallel_size(self, world):
        if world % 2:
            raise ValueError(f"{world} devices are not pairs")
        return world // 2


@turnwise.hookimpl
def inference_backends():
    return [Implementation("paired", FakeBackend, Pairs)]
"""
"""Lines of a plugin file: a backend whose engines take two devices each, or none where it is attached to one that runs."""
