"""One hook per kind of implementation. Each returns a list of `Implementation` records; pluggy is used for discovery
alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy
from attrs import field, frozen

hookspec = pluggy.HookspecMarker("turnwise")
hookimpl = pluggy.HookimplMarker("turnwise")


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)  # a bare text is one name, not its letters


@frozen
class Implementation:
    """One implementation of a kind.

    `target`: the class, or `"module:Class"`, imported when it is built. `config`: its attrs class or `"module:Class"`
    (none, as environments always: options are checked against the constructor's signature and annotations).
    `requires`: import names without which it cannot work in any mode. `aliases`: other names it answers to, within its
    kind. `presets`: named option sets (`strategy_config: ${deepspeed_zero3}`).
    `fixtures`:
    `"module:function"` that gives the conformance kit what it needs to build one.
    """

    name: str
    target: Any
    config: Any = None
    requires: tuple[str, ...] = field(default=(), converter=_names)
    aliases: tuple[str, ...] = field(default=(), converter=_names)
    summary: str = ""
    presets: dict[str, dict[str, Any]] = field(factory=dict)
    fixtures: Any = None


def faults(record: Implementation) -> str:
    """Why a record cannot be used, or the empty string; attrs does not check what a plugin puts into it."""
    if not (isinstance(record.name, str) and record.name):
        return f"whose name is {record.name!r:.60}; it must be text"
    for key in ("requires", "aliases"):
        if odd := [one for one in getattr(record, key) if not isinstance(one, str)]:
            return f"{record.name!r} whose {key} holds {odd[0]!r:.60}; it must be text"
    if not (callable(record.target) or _names_a_class(record.target)):
        return f"{record.name!r} whose target is {record.target!r:.60}; it must be a class, or 'module:Class'"
    for key in ("config", "fixtures"):
        value = getattr(record, key)
        if not (value is None or callable(value) or _names_a_class(value)):
            return (
                f"{record.name!r} whose {key} is {value!r:.60}; it must be None, a class or function, or 'module:name'"
            )
    if not isinstance(record.presets, dict) or not all(
        isinstance(k, str) and isinstance(v, dict) and _plain(v) for k, v in record.presets.items()
    ):
        return (
            f"{record.name!r} whose presets are {record.presets!r:.60}; they must be {{name: {{option: value}}}} of"
            " plain data"
        )
    return (
        ""
        if isinstance(record.summary, str)
        else f"{record.name!r} whose summary is {record.summary!r:.60}; it must be text"
    )


# A text is checked by its form alone: importing it is left to its first use.
def _names_a_class(value: Any) -> bool:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(module and colon and name)


# Presets become values of a configuration, which holds plain data alone.
def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _plain(v) for k, v in value.items())
    return (
        all(map(_plain, value))
        if isinstance(value, list | tuple)
        else value is None or isinstance(value, str | int | float | bool)
    )


class Hooks:
    """The hook specifications. A plugin is a module with some of these functions, each marked `@turnwise.hookimpl`."""

    @hookspec
    def environments(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Environments (turnwise.contracts.environment). Built with `env_config` as keyword arguments.

        >>> @turnwise.hookimpl
        ... def environments():
        ...     return [turnwise.Implementation("guess_number", GuessNumber)]
        """

    @hookspec
    def env_managers(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Environment managers (turnwise.contracts.env_manager).

        >>> @turnwise.hookimpl
        ... def env_managers():
        ...     return [
        ...         turnwise.Implementation("debate", "my_plugin.debate:Debate", config="my_plugin.config:DebateConfig")
        ...     ]
        """

    @hookspec
    def inference_backends(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Inference backends (turnwise.contracts.inference).

        >>> @turnwise.hookimpl
        ... def inference_backends():
        ...     return [turnwise.Implementation("my_engine", "my_plugin.backend:Backend", requires=("my_engine",))]
        """

    @hookspec
    def train_strategies(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Training strategies (turnwise.contracts.train).

        >>> @turnwise.hookimpl
        ... def train_strategies():
        ...     return [
        ...         turnwise.Implementation("my_trainer", "my_plugin.strategy:Strategy", aliases=("my_trainer_train",))
        ...     ]
        """

    @hookspec
    def advantage_estimators(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Advantage estimators (turnwise.contracts.estimator).

        >>> @turnwise.hookimpl
        ... def advantage_estimators():
        ...     return [turnwise.Implementation("last_step", LastStep)]
        """

    @hookspec
    def policy_losses(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Policy losses (turnwise.contracts.loss).

        >>> @turnwise.hookimpl
        ... def policy_losses():
        ...     return [
        ...         turnwise.Implementation("my_loss", "my_plugin.loss:MyLoss", config="my_plugin.config:MyLossConfig")
        ...     ]
        """

    @hookspec
    def batch_adjusts(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Batch-adjust policies (turnwise.contracts.batch_adjust).

        >>> @turnwise.hookimpl
        ... def batch_adjusts():
        ...     return [turnwise.Implementation("halves", Halves)]
        """

    @hookspec
    def group_filters(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Group filters (turnwise.contracts.group_filter).

        >>> @turnwise.hookimpl
        ... def group_filters():
        ...     return [turnwise.Implementation("only_hard", OnlyHard)]
        """

    @hookspec
    def loggers(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Loggers (turnwise.contracts.logger).

        >>> @turnwise.hookimpl
        ... def loggers():
        ...     return [turnwise.Implementation("csv", "my_plugin.csv:CsvLogger")]
        """

    @hookspec
    def runtimes(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Runtimes (turnwise.contracts.runtime).

        >>> @turnwise.hookimpl
        ... def runtimes():
        ...     return [turnwise.Implementation("cluster", "my_plugin.runtime:Cluster", requires=("my_cluster",))]
        """

    @hookspec
    def model_sources(self) -> list[Implementation]:  # type: ignore[empty-body]
        """Model sources (turnwise.contracts.chat).

        >>> @turnwise.hookimpl
        ... def model_sources():
        ...     return [turnwise.Implementation("store", "my_plugin.store:ModelStore")]
        """


KINDS: dict[str, str] = {
    "environments": "environment",
    "env_managers": "env_manager",
    "inference_backends": "inference_backend",
    "train_strategies": "train_strategy",
    "advantage_estimators": "advantage_estimator",
    "policy_losses": "policy_loss",
    "batch_adjusts": "batch_adjust",
    "group_filters": "group_filter",
    "loggers": "logger",
    "runtimes": "runtime",
    "model_sources": "model_source",
}
"""Hook name → kind."""
