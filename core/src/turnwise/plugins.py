"""The plugin manager: discovery by entry points, isolation of what is broken, declaration in the YAML, look-up, lazy building."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from attrs import define, field, frozen

from turnwise import hookspecs
from turnwise.errors import PluginError, did_you_mean, listed
from turnwise.hookspecs import KINDS, Implementation

GROUP = "turnwise"
DISABLE = "TURNWISE_DISABLE_PLUGINS"


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
    def missing(self) -> tuple[str, ...]:
        """Import names that every mode of it needs and that are not installed."""
        return tuple(name for name in self.implementation.requires if not _installed(name))

    @property
    def status(self) -> str:
        """`ok` or `missing: a, b`."""
        return f"missing: {', '.join(self.missing)}" if self.missing else "ok"

    def target(self) -> Any:
        """The class, imported now. Raises PluginError with the cause chained."""
        if self.missing:
            raise PluginError(
                f"{self.kind} {self.name!r} (from {self.distribution}) needs {', '.join(self.missing)}, not installed. "
                f"Fix: pip install '{self.distribution}[{self.name}]' or the package itself."
            )
        return self._load(self.implementation.target)

    def config_class(self) -> Any | None:
        """The attrs class of its options, or None."""
        return self._load(self.implementation.config)

    def fixtures(self) -> Any | None:
        """The function that supplies the conformance kit, or None."""
        return self._load(self.implementation.fixtures)

    def _load(self, what: Any) -> Any:
        if not isinstance(what, str):
            return what
        module, _, attribute = what.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise PluginError(
                f"{self.kind} {self.name!r} (from {self.distribution}) cannot be loaded from {what!r}: {type(error).__name__}: {error}. "
                "Fix: reinstall or repair the plugin, or name another implementation."
            ) from error


@frozen(eq=False)
class Broken:
    """A plugin that could not be loaded: it is reported, and whatever it would have provided is not there."""

    plugin: str
    distribution: str
    version: str
    why: str
    error: BaseException | None = None


@define(eq=False)
class Registry:
    """All implementations of this process, by kind and name."""

    _entries: list[Entry] = field(factory=list)
    broken: list[Broken] = field(factory=list)
    blocked: set[str] = field(factory=set)
    _seen: set[str] = field(factory=set)
    _manager: pluggy.PluginManager = field(factory=lambda: _manager())

    @classmethod
    def discover(cls) -> Registry:
        """Everything that is installed, less what TURNWISE_DISABLE_PLUGINS names."""
        found = cls(blocked={_canonical(n) for n in os.environ.get(DISABLE, "").split(",") if n.strip()})
        for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: p.name):
            found._load_entry_point(point)
        return found

    def entries(self, kind: str | None = None) -> list[Entry]:
        """All entries, or those of a kind, by kind and name; blocked plugins left out."""
        mine = [e for e in self._entries if kind in (None, e.kind) and not self._is_blocked(e.plugin, e.distribution)]
        return sorted(mine, key=lambda e: (e.kind, e.name, e.distribution))

    def find(self, kind: str, name: str) -> Entry:
        """The entry that answers to `name`. Raises PluginError: unknown (with the nearest name), duplicate, or of a broken plugin."""
        known = self.entries(kind)
        hits = [e for e in known if name == e.name] or [e for e in known if name in e.implementation.aliases]
        if len(hits) == 1:
            return hits[0]
        label = kind.replace("_", " ")
        if len(hits) > 1:
            owners = " and ".join(f"{e.distribution} {e.version}" for e in hits)
            raise PluginError(f"{label} {name!r} is provided twice: by {owners}. Fix: uninstall one, or block it with plugins: ['no:NAME'].")
        broken = "".join(f" Broken: {b.plugin} ({b.why})." for b in self.broken)
        cause = next((b.error for b in self.broken if b.error is not None), None)
        names = [n for e in known for n in (e.name, *e.implementation.aliases)]
        raise PluginError(
            f"no {label} is named {name!r}.{did_you_mean(name, names)} Installed: {listed(e.name for e in known)}.{broken} "
            "Fix: correct the name, or pip install the plugin that provides it and name it under plugins:."
        ) from cause

    def build(self, kind: str, name: str, config: Any = None, context: Any = None) -> Any:
        """Build an implementation: environments from keyword arguments, every other kind as Target(config, context).

        `config` is the structured config class, a mapping of options where the implementation has none, or None for defaults.
        """
        entry = self.find(kind, name)
        target = entry.target()
        if kind == "environment":
            options = dict(config or {})
            self.check_options(entry, options)
            return target(**options)
        if entry.implementation.config is not None:
            return target(entry.config_class()() if config is None else config, context)
        if isinstance(config, Mapping):
            self.check_options(entry, config)
            return target(None, context, **config)
        return target(config, context)

    def check_options(self, entry: Entry, options: Mapping[str, Any]) -> None:
        """Compare options with the constructor's signature, for implementations without a config class. Raises PluginError."""
        parameters = inspect.signature(entry.target()).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        known = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        known = known if entry.kind == "environment" else known[2:]
        label = f"{entry.kind.replace('_', ' ')} {entry.name!r}"
        for option in options:
            if option not in known:
                raise PluginError(f"{label} has no option {option!r}.{did_you_mean(option, known)} Its options: {listed(known)}.")
        needed = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in options]
        if needed:
            raise PluginError(f"{label} needs the option{'s' if len(needed) > 1 else ''} {listed(needed)}.")

    def declare(self, plugins: Iterable[str], base: Path | None = None) -> None:
        """Make a YAML's `plugins:` available: requirement strings, modules, single files (relative to `base`), `no:NAME` to block.

        Raises PluginError that names everything that is missing at once, with the pip command.
        """
        problems: list[str] = []
        wanted: list[str] = []
        for item in plugins:
            if item.startswith("no:"):
                self.blocked.add(_canonical(item[3:]))
            elif item.endswith(".py"):
                problems += self._declare_file((base or Path()) / item, item)
            elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", item):
                problems += self._declare_module(item)
            else:
                line, requirement = self._declare_requirement(item)
                problems += line
                wanted += requirement
        if problems:
            fix = f" Fix: pip install {' '.join(repr(w) for w in wanted)}" if wanted else ""
            raise PluginError("plugins: " + "; ".join(problems) + "." + fix)

    def _declare_file(self, path: Path, item: str) -> list[str]:
        key = str(path.resolve())
        if key in self._seen:
            return []
        if not path.is_file():
            return [f"the file {item!r} does not exist"]
        name = "turnwise_file_" + re.sub(r"\W", "_", path.stem)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that its classes pickle
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            return [self._break(item, item, "", f"{type(error).__name__}: {error}", error)]
        return self._declared(module, item, key)

    def _declare_module(self, item: str) -> list[str]:
        if item in self._seen:
            return []
        try:
            module = importlib.import_module(item)
        except Exception as error:
            return [self._break(item, item, "", f"{type(error).__name__}: {error}", error)]
        return self._declared(module, item, item)

    def _declared(self, module: ModuleType, item: str, key: str) -> list[str]:
        before = len(self.broken)
        self._register(module, item, item, "")
        if len(self.broken) > before:
            return [f"{item!r} is broken: {self.broken[-1].why}"]
        self._seen.add(key)
        return []

    def _declare_requirement(self, item: str) -> tuple[list[str], list[str]]:
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(item)
        except InvalidRequirement as error:
            return [f"{item!r} is not a requirement, a module or a .py file ({error})"], []
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if _installed(item):
                return self._declare_module(item), []
            return [f"{requirement.name!r} is not installed{did_you_mean(requirement.name, [e.distribution for e in self._entries])}"], [item]
        if not requirement.specifier.contains(version, prereleases=True):
            return [f"{requirement.name!r} {version} is installed, {item!r} is wanted"], [item]
        broken = next((b for b in self.broken if _canonical(b.distribution) == _canonical(requirement.name)), None)
        return ([f"{requirement.name!r} is broken: {broken.why}"] if broken else []), []

    def _load_entry_point(self, point: importlib.metadata.EntryPoint) -> None:
        distribution = point.dist.name if point.dist else "?"
        version = point.dist.version if point.dist else ""
        if self._is_blocked(point.name, distribution):
            return
        wanted = _core_range(point)
        if wanted:
            self._break(point.name, distribution, version, wanted, None)
            return
        try:
            module = point.load()
        except Exception as error:  # a stranger's module may raise anything; it is isolated and reported
            self._break(point.name, distribution, version, f"{type(error).__name__}: {error}", error)
            return
        self._register(module, point.name, distribution, version)

    def _register(self, module: Any, plugin: str, distribution: str, version: str) -> None:
        marked = {n: f for n, f in vars(module).items() if getattr(f, "turnwise_impl", None) is not None}
        for name in marked:
            if name not in KINDS:
                self._break(plugin, distribution, version, f"unknown hook {name!r}.{did_you_mean(name, KINDS)} Hooks: {listed(KINDS)}", None)
                return
        if self._manager.is_registered(module):  # named under plugins: and installed too
            return
        self._manager.register(module, name=f"{distribution}:{plugin}")
        fresh: list[Entry] = []
        for hook, kind in KINDS.items():
            if hook not in marked:
                continue
            try:
                records = marked[hook]()
                fresh += [Entry(kind, _record(r, hook), plugin, distribution, version) for r in records]
            except Exception as error:  # as above
                self._break(plugin, distribution, version, f"hook {hook!r}: {type(error).__name__}: {error}", error)
                return
        self._entries += fresh

    def _break(self, plugin: str, distribution: str, version: str, why: str, error: BaseException | None) -> str:
        self.broken.append(Broken(plugin, distribution, version, why, error))
        return f"{plugin!r} is broken: {why}"

    def _is_blocked(self, plugin: str, distribution: str) -> bool:
        return bool(self.blocked & {_canonical(plugin), _canonical(distribution), _canonical(distribution).removeprefix("turnwise-")})


def _record(record: Any, hook: str) -> Implementation:
    if not isinstance(record, Implementation):
        raise TypeError(f"{hook} returned {record!r:.60}; it must return a list of turnwise.Implementation")
    return record


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs.Hooks)
    return manager


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _installed(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _core_range(point: importlib.metadata.EntryPoint) -> str:
    """Why the plugin's requirement on the core does not admit this core, or the empty string."""
    from packaging.requirements import Requirement

    from turnwise import __version__

    for text in (point.dist.requires or ()) if point.dist else ():
        if re.match(r"turnwise(?![\w.-])", text):
            requirement = Requirement(text)
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and not requirement.specifier.contains(
                __version__, prereleases=True
            ):
                return f"needs turnwise{requirement.specifier}, this is {__version__}"
    return ""


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


def plugins_of(entries: Iterable[Entry]) -> Iterator[str]:
    """The distributions behind some entries, each once."""
    yield from dict.fromkeys(e.distribution for e in entries)
