"""What the registry holds: a registered implementation, loaded on use, and a plugin that could not be loaded."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from turnwise.errors import PluginError, one_line, pip_install
from turnwise.hookspecs import Implementation, faults
from turnwise.importing import StrangerError, attribute, is_there


@frozen(eq=False)
class Entry:
    """One implementation and where it comes from."""

    kind: str
    implementation: Implementation
    plugin: str
    distribution: str
    version: str

    @property
    def name(self) -> str:
        """The name that the YAML uses."""
        return self.implementation.name

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, then its aliases: all that it answers to."""
        return (self.name, *self.implementation.aliases)

    @property
    def owner(self) -> str:
        """The distribution and its version, or the file or module."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def missing(self) -> tuple[str, ...]:
        """Import names that every mode of it needs and that are not installed."""
        return tuple(name for name in self.implementation.requires if not is_there(name))

    @property
    def status(self) -> str:
        """`ok` or `missing: a, b`."""
        return f"missing: {', '.join(self.missing)}" if self.missing else "ok"

    def target(self) -> Any:  # Any: a class of the plugin's own
        """The class, imported now. Raises PluginError with the cause chained."""
        if self.missing:
            raise PluginError(
                f"{self.kind} {self.name!r} (from {self.distribution}) needs {', '.join(self.missing)}, not installed. "
                f"Fix: {pip_install(f'{self.distribution}[{self.name}]')}, or the package itself."
            )
        target = self._load(self.implementation.target)
        if not callable(target):
            raise PluginError(
                f"{self.kind} {self.name!r} (from {self.distribution}): its target {target!r:.60} is no class. Fix:"
                " repair the plugin."
            )
        return target

    def config_class(self) -> Any | None:  # Any: a class of the plugin's own
        """The attrs class of its options, or None."""
        return self._load(self.implementation.config)

    def fixtures(self) -> Any | None:  # Any: a function of the plugin's own
        """The function that supplies the conformance kit, or None."""
        return self._load(self.implementation.fixtures)

    def _load(self, what: Any) -> Any:
        if not isinstance(what, str):
            return what
        try:
            return attribute(what)
        except StrangerError as failure:
            error = failure.error
            raise PluginError(
                f"{self.kind} {self.name!r} (from {self.distribution}) cannot be loaded from {what!r}:"
                f" {one_line(error)}. Fix: reinstall or repair the plugin, or name another implementation."
            ) from error


@frozen(eq=False)
class Broken:
    """A plugin that could not be loaded: it is reported, and whatever it would have provided is not there."""

    plugin: str
    distribution: str
    version: str
    why: str
    error: BaseException | None = None


class UndeclaredError(Exception):
    """One item of `plugins:` that is not there or does not work; `install`: what pip would have to install."""

    def __init__(self, line: str, install: str = "") -> None:
        super().__init__(line)
        self.install = install


def records_of(records: Any, hook: str) -> list[Implementation]:  # Any: what a hook returned, unchecked
    """What a hook returned, if it is a list of usable records; else TypeError."""
    if not isinstance(records, list | tuple):
        raise TypeError(f"{hook} returned {records!r:.60}; it must return a list of turnwise.Implementation")
    for record in records:
        if not isinstance(record, Implementation):
            raise TypeError(
                f"{hook} returned {record!r:.60} in its list; it must return a list of turnwise.Implementation"
            )
        if why := faults(record) or _of_the_kind(record, hook):
            raise TypeError(f"{hook} returned an Implementation {why}")
    return list(records)


def _of_the_kind(record: Implementation, hook: str) -> str:
    """Why a hook's kind has no use for a record, or the empty string."""
    if hook == "environments" and record.config is not None:
        return (
            f"{record.name!r} whose config is {record.config!r:.60}; an environment's options are its constructor's"
            " keyword arguments, with their annotations: config must be None"
        )
    return ""
