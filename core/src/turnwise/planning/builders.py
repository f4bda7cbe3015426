"""What builds an environment, a manager or a player where it is used: picklable, so that workers can have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from turnwise.config.schema import Choice
from turnwise.contracts.env_manager import ManagerContext
from turnwise.contracts.inference import InferenceBackend, InferenceContext
from turnwise.plugins import Registry, registry


@frozen
class _Builder:
    """What a process must know before it can build anything by name: the run's plugins, and the folder that relative
    files among them lie in."""

    plugins: tuple[str, ...] = field(default=(), kw_only=True)
    base: str = field(default=".", kw_only=True)

    def _registry(self) -> Registry:
        # The driver has done this, and nothing is imported twice; a worker process begins with what is installed alone.
        known = registry()
        known.declare(self.plugins, Path(self.base))
        return known


@frozen
class EnvironmentBuilder(_Builder):
    """Builds one environment by name, in any process."""

    name: str
    options: Mapping[str, Any] = field(factory=dict)

    def __call__(self) -> Any:
        """A new environment."""
        return self._registry().build("environment", self.name, self.options)


@frozen
class ManagerBuilder(_Builder):
    """Builds the environment manager of a tag by name, in any process."""

    choice: Choice
    context: ManagerContext

    def __call__(self) -> Any:
        """A new manager."""
        self._registry()
        return build("env_manager", self.choice, self.context)


@frozen
class PlayerBuilder(_Builder):
    """Builds a player by name, in any process."""

    choice: Choice
    seed: int

    def __call__(self) -> InferenceBackend:
        """A new player."""
        self._registry()
        return player(self.choice, self.seed)


def build(kind: str, choice: Choice, context: Any) -> Any:  # Any: an implementation of the kind asked for
    """Build a chosen implementation."""
    return registry().build(kind, choice.name, config_of(choice), context)


def player(choice: Choice, seed: int) -> InferenceBackend:
    """An inference backend that needs no model folder: a player."""
    backend: InferenceBackend = build("inference_backend", choice, InferenceContext(model=None, chat=None, seed=seed))
    return backend


def config_of(choice: Choice) -> Any:  # Any: the implementation's config class
    """The structured config of a choice, or its plain options where the implementation has no config class."""
    return choice.config if choice.config is not None else (choice.options or None)
