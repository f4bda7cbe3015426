"""What builds an environment, a manager or a player where it is used: picklable, so that workers can have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from turnwise.config.schema import Choice
from turnwise.contracts.env_manager import ManagerContext
from turnwise.contracts.inference import InferenceBackend, InferenceContext
from turnwise.plugins import registry


@frozen
class EnvironmentBuilder:
    """Builds one environment by name, in any process: it declares the run's plugins first."""

    name: str
    options: Mapping[str, Any] = field(factory=dict)
    plugins: tuple[str, ...] = ()
    base: str = "."

    def __call__(self) -> Any:
        """A new environment."""
        known = registry()
        known.declare(self.plugins, Path(self.base))
        return known.build("environment", self.name, self.options)


@frozen
class ManagerBuilder:
    """Builds the environment manager of a tag by name, in any process: it declares the run's plugins first."""

    choice: Choice
    context: ManagerContext
    plugins: tuple[str, ...] = ()
    base: str = "."

    def __call__(self) -> Any:
        """A new manager."""
        registry().declare(self.plugins, Path(self.base))
        return build("env_manager", self.choice, self.context)


@frozen
class PlayerBuilder:
    """Builds a player by name, in any process: it declares the run's plugins first."""

    choice: Choice
    seed: int
    plugins: tuple[str, ...] = ()
    base: str = "."

    def __call__(self) -> InferenceBackend:
        """A new player."""
        registry().declare(self.plugins, Path(self.base))
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
