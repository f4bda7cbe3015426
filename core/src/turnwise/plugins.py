"""The plugin manager: discovery by entry points, isolation of what is broken, declaration in the YAML, look-up, lazy
building."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from attrs import define, field

from turnwise import hookspecs
from turnwise.distributions import canonical, core_range, owner, stem
from turnwise.entries import Broken, Entry, UndeclaredError, records_of
from turnwise.errors import (
    MissingPluginError,
    PluginError,
    TurnwiseError,
    UnknownNameError,
    boundary,
    did_you_mean,
    listed,
    one_line,
    pip_install,
)
from turnwise.hookspecs import KINDS
from turnwise.importing import StrangerError, guarded, is_there, single_file

GROUP = "turnwise"
DISABLE = "TURNWISE_DISABLE_PLUGINS"


@define(eq=False)
class Registry:
    """All implementations of this process, by kind and name."""

    _entries: list[Entry] = field(factory=list)
    broken: list[Broken] = field(factory=list)
    blocked: set[str] = field(factory=set)
    _seen: set[str] = field(factory=set)
    _manager: pluggy.PluginManager = field(factory=lambda: _manager())  # noqa: PLW0108 (defined below)

    @classmethod
    def discover(cls) -> Registry:
        """Everything that is installed, less what TURNWISE_DISABLE_PLUGINS names."""
        found = cls(blocked={canonical(n) for n in os.environ.get(DISABLE, "").split(",") if n.strip()})
        # By name: which of two plugins comes first must not depend on the order on disk.
        for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: p.name):
            found._load_entry_point(point)
        return found

    def add(self, *entries: Entry) -> None:
        """Hold further entries as they are, of no plugin (for tests: turnwise.testing.registered)."""
        self._entries += entries

    @property
    def declared(self) -> list[str]:
        """The modules and files (by their whole paths) that were declared: another process that declares them has the
        same implementations."""
        return sorted(self._seen)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """All entries, or those of a kind, by kind and name; blocked plugins left out."""
        mine = [e for e in self._entries if kind in (None, e.kind) and not self._is_blocked(e.plugin, e.distribution)]
        return sorted(mine, key=lambda e: (e.kind, e.name, e.distribution))

    def find(self, kind: str, name: str) -> Entry:
        """The entry that answers to `name`. Raises UnknownNameError (with the nearest name, and what is broken), or
        PluginError: a duplicate."""
        known = self.entries(kind)
        hits, label = [e for e in known if name in e.names], kind.replace("_", " ")
        if len(hits) == 1:
            return hits[0]
        if len(hits) > 1:
            owners = " and ".join(e.owner + (f" (an alias of {e.name!r})" if e.name != name else "") for e in hits)
            raise PluginError(
                f"{label} {name!r} is provided twice: by {owners}. Fix: uninstall one, or block it with plugins:"
                " ['no:NAME']."
            )
        faulty = [b for b in self.broken if not self._is_blocked(b.plugin, b.distribution)]
        notes = "".join(f" Broken: {b.plugin} ({b.why})." for b in faulty) + (
            f" Blocked: {listed(self.blocked)}." if self.blocked else ""
        )
        cause = next((b.error for b in faulty if b.error is not None), None)
        hint = did_you_mean(name, [n for e in known for n in e.names])
        raise UnknownNameError(
            f"no {label} is named {name!r}.{hint} "
            f"Installed: {listed(e.name for e in known)}.{notes} "
            "Fix: correct the name, or install a plugin that provides it and name it under plugins:.",
            misspelt=bool(hint),
        ) from cause

    # Any: an implementation of the kind asked for
    def build(self, kind: str, name: str, config: Any = None, context: Any = None) -> Any:
        """Build an implementation: environments from keyword arguments, every other kind as Target(config, context).

        `config` is the structured config class, a mapping of options where the implementation has none, or None for
        defaults.
        """
        entry = self.find(kind, name)
        target = entry.target()
        if kind == "environment":
            options = dict(config or {})
            self.check_options(entry, options)
            return target(**options)
        label = f"{kind.replace('_', ' ')} {entry.name!r}"
        with boundary(label, PluginError):
            try:
                config_class = entry.config_class()
                if config_class is not None:
                    return target(config_class() if config is None else config, context)
                if isinstance(config, Mapping):
                    self.check_options(entry, config)
                    return target(None, context, **config)
                return target(config, context)
            except TurnwiseError:
                raise
            except Exception as error:  # a stranger's constructor may raise anything
                why = f"(from {entry.owner}) cannot be built: {one_line(error)}"
                raise PluginError(f"{label} {why}. Fix: repair the plugin, or its options.") from error

    def check_options(self, entry: Entry, options: Mapping[str, Any]) -> None:  # Any: a plugin's options
        """Compare options with the constructor's signature, for implementations without a config class. Raises
        PluginError."""
        try:
            parameters = inspect.signature(entry.target()).parameters
        except (ValueError, TypeError):  # a class written in C has none; it judges its options itself
            return
        # **options: it judges them itself.
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        known = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        # Every other kind gets its config and context first, which are no options.
        known = known if entry.kind == "environment" else known[2:]
        label = f"{entry.kind.replace('_', ' ')} {entry.name!r}"
        for option in options:
            if option not in known:
                raise PluginError(
                    f"{label} has no option {option!r}.{did_you_mean(option, known)} Its options: {listed(known)}. Fix:"
                    " correct or remove it."
                )
        needed = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in options]
        if needed:
            raise PluginError(
                f"{label} needs the option{'s' if len(needed) > 1 else ''} {listed(needed)}. Fix: write"
                f" {'them' if len(needed) > 1 else 'it'}."
            )

    def declare(self, plugins: Iterable[str], base: Path | None = None) -> None:
        """Make a YAML's `plugins:` available: requirement strings, modules, single files (relative to `base`),
        `no:NAME` to block.

        Raises PluginError that names everything that is missing at once, with the pip command.
        """
        problems: list[UndeclaredError] = []
        for item in plugins:
            try:
                self._declare_one(item, base or Path())
            except UndeclaredError as problem:
                problems.append(problem)
        if problems:
            wanted = [p.install for p in problems if p.install]
            install = [pip_install(*wanted)] if wanted else []
            others = ["correct or repair it, or remove it from plugins"] if len(wanted) < len(problems) else []
            # One cause can be chained: the first that has a traceback to show.
            cause = next((p.__cause__ for p in problems if p.__cause__ is not None), None)
            fault = MissingPluginError if len(wanted) == len(problems) else PluginError
            raise fault(
                "plugins: " + "; ".join(str(p) for p in problems) + ". Fix: " + "; ".join([*install, *others])
            ) from cause

    def _declare_one(self, item: str, base: Path) -> None:
        if item.startswith("no:"):
            self.blocked.add(canonical(item[3:]))
        elif item.endswith(".py"):
            self._declare_file((base / item).resolve(), item)
        elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", item):
            self._declare_module(item)
        else:
            self._declare_requirement(item)

    def _declare_file(self, path: Path, item: str) -> None:
        if str(path) in self._seen:
            return
        if not _is_file(path):
            raise UndeclaredError(f"the file {item!r} does not exist")
        try:
            module = single_file(path)
        except StrangerError as failure:
            raise self._undeclared(item, failure.error) from failure.error
        self._declared(module, item, str(path))

    def _declare_module(self, item: str) -> None:
        if item in self._seen:
            return
        try:
            with guarded():
                module = importlib.import_module(item)
        except StrangerError as failure:
            error = failure.error
            if (
                isinstance(error, ModuleNotFoundError)
                and error.name is not None
                and f"{item}.".startswith(f"{error.name}.")
            ):
                raise UndeclaredError(f"the module {item!r} is not installed") from error
            raise self._undeclared(item, error) from error
        self._declared(module, item, item)

    def _declared(self, module: ModuleType, item: str, key: str) -> None:
        before = len(self.broken)
        self._register(module, item, item, "")
        if len(self.broken) > before:
            raise UndeclaredError(f"{item!r} is broken: {self.broken[-1].why}") from self.broken[-1].error
        # Only now: what failed is tried, and reported, again.
        self._seen.add(key)

    def _undeclared(self, item: str, error: BaseException) -> UndeclaredError:
        self._break(item, item, "", one_line(error), error)
        return UndeclaredError(f"{item!r} is broken: {one_line(error)}")

    def _declare_requirement(self, item: str) -> None:
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(item)
        except InvalidRequirement as error:
            why = str(error).split("\n", maxsplit=1)[0]
            raise UndeclaredError(f"{item!r} is not a requirement, a module or a .py file ({why})") from error
        if requirement.marker is not None and not requirement.marker.evaluate():
            return
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            # A module without a distribution, such as one on PYTHONPATH.
            if is_there(item):
                self._declare_module(item)
                return
            # The prefix alone makes no two names alike.
            stems = {stem(e.distribution): e.distribution for e in self._entries}
            near = difflib.get_close_matches(stem(requirement.name), stems, n=1)
            hint = f" (did you mean {stems[near[0]]!r}?)" if near else ""
            raise UndeclaredError(f"{requirement.name!r} is not installed{hint}", install=item) from None
        if not requirement.specifier.contains(version, prereleases=True):
            raise UndeclaredError(f"{requirement.name!r} {version} is installed, {item!r} is wanted", install=item)
        broken = next((b for b in self.broken if canonical(b.distribution) == canonical(requirement.name)), None)
        if broken is not None:
            raise UndeclaredError(f"{requirement.name!r} is broken: {broken.why}") from broken.error

    def _load_entry_point(self, point: importlib.metadata.EntryPoint) -> None:
        distribution, version = owner(point)
        # Before anything is imported: blocking is the way around a plugin that breaks at import.
        if self._is_blocked(point.name, distribution):
            return
        # Before the import too: a plugin for another core may fail in ways that say less.
        wanted = core_range(point)
        if wanted:
            self._break(point.name, distribution, version, wanted, None)
            return
        try:
            with guarded():
                module = point.load()
        except StrangerError as failure:  # isolated and reported
            self._break(point.name, distribution, version, one_line(failure.error), failure.error)
            return
        self._register(module, point.name, distribution, version)

    def _register(self, module: Any, plugin: str, distribution: str, version: str) -> None:
        if self._manager.is_registered(module):  # named under plugins: and installed too
            return
        marked = {
            n: f
            for n, f in getattr(module, "__dict__", {}).items()
            if inspect.isroutine(f) and getattr(f, "turnwise_impl", None) is not None
        }
        unknown = (f"unknown hook {name!r}.{did_you_mean(name, KINDS)}" for name in marked if name not in KINDS)
        why = next(unknown, "") if marked else "it has no hook."
        if why:
            self._break(
                plugin, distribution, version, f"{why} Hooks, each marked @turnwise.hookimpl: {listed(KINDS)}", None
            )
            return
        # All or nothing: a plugin that breaks in its second hook leaves no half of itself behind.
        fresh, hook = list[Entry](), ""
        try:
            # pluggy refuses a name twice, and two plugins may have one.
            self._manager.register(module, name=f"{distribution}:{plugin}:{len(self._manager.get_plugins())}")
            for hook, kind in KINDS.items():
                if hook in marked:
                    with guarded():
                        records = records_of(marked[hook](), hook)
                    fresh += [Entry(kind, record, plugin, distribution, version) for record in records]
        except Exception as raised:  # as above; the hooks' signatures are pluggy's to judge
            error = raised.error if isinstance(raised, StrangerError) else raised
            self._break(
                plugin, distribution, version, f"hook {hook!r}: {one_line(error)}" if hook else one_line(error), error
            )
            return
        self._entries += fresh

    def _break(self, plugin: str, distribution: str, version: str, why: str, error: BaseException | None) -> None:
        self.broken.append(Broken(plugin, distribution, version, why, error))

    def _is_blocked(self, plugin: str, distribution: str) -> bool:
        return bool(self.blocked & {canonical(plugin), canonical(distribution), stem(distribution)})


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs.Hooks)
    return manager


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


_registry: Registry | None = None


def registry() -> Registry:
    """This process's registry, discovered on first use."""
    global _registry  # noqa: PLW0603
    if _registry is None:
        _registry = Registry.discover()
    return _registry


def reset_registry() -> None:
    """Forget the process's registry; the next use discovers again (for tests)."""
    global _registry  # noqa: PLW0603
    _registry = None
