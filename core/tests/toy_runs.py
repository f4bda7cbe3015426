"""What `turnwise check` finds in a toy run, for tests; the fixture `toy` writes its YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from turnwise.cli.main import main
from turnwise.config.loader import load
from turnwise.config.schema import RunConfig
from turnwise.planning import device_problems
from turnwise.planning.preflight import Findings, preflight

Toy = Callable[..., Path]
NOTE = "loaded like actor_train"
"""Of a reference that a KL coefficient calls for."""
WARNING = "has no effect: init_kl_coef is 0"
"""Of target_kl without init_kl_coef."""
NOTED = {"kl_loss_coef": 0.1, "target_kl": 0.1}
"""A run of which both are said."""


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


def turnwise(*arguments: Any) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(main, [str(a) for a in arguments])


STRATEGY = """
import os, signal
from turnwise.errors import OutOfMemory, TrainerError
from turnwise.testing.fakes import FakeStrategy

class Mine(FakeStrategy):
    def update(self, update):
        {what}
        return super().update(update)

@turnwise.hookimpl
def train_strategies():
    return [Implementation("mine", Mine)]
"""


def with_strategy(toy: Toy, tmp_path: Path, what: str, **changes: Any) -> Path:
    """A run whose strategy does `what` at every update."""
    actor = {
        "strategy_args": {"strategy_name": "mine"},
        "training_args": {"per_device_train_batch_size": 2, "learning_rate": 5.0},
    }
    return toy(plugins=plugin(tmp_path, STRATEGY.format(what=what)), actor_train=actor, **changes)
