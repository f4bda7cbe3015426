"""Importing what a stranger wrote: its prints are kept off the output, whatever it raises is an error, a single file
finds its neighbours."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "turnwise_file_"
"""How the packages begin that stand for the folders of single files; two folders may hold neighbours of the same name."""


class StrangerError(Exception):
    """What a stranger's module, hook or attribute raised, BaseExceptions included: `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Run a stranger's code: what it prints goes to stderr (`plan --json` prints JSON), what it raises becomes
    StrangerError.

    Ctrl-C alone gets through: a `sys.exit(0)` at import would end a command with the exit code of success."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise StrangerError(error) from error


def is_there(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    # find_spec raises ValueError for a module that is loaded and has no spec.
    if sys.modules.get(name) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # of a dotted name the parent is imported, and it may raise anything
        return False


def attribute(where: str) -> Any:  # Any: whatever stands there
    """What `"module:Class"` names. Raises StrangerError."""
    with guarded():
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)


def single_file(path: Path) -> ModuleType:
    """The module of one file, under a name of its own that pickles. Raises StrangerError.

    `import helpers` and `from . import helpers` find `helpers.py` beside it, at any time and from each other."""
    name = f"{_package(path.parent)}.{path.stem}"
    spec = importlib.util.spec_from_loader(name, _Loader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes pickle
    try:
        with guarded():
            spec.loader.exec_module(module)
    except StrangerError:
        # A half-run module would be found by the next import as if it were whole.
        del sys.modules[name]
        raise
    return module


def _package(folder: Path) -> str:
    # The same in every process, as `hash` of text is not: classes are pickled under this name.
    name = f"{FOLDER}{zlib.crc32(str(folder).encode()):08x}"
    if name not in sys.modules:
        package = ModuleType(name, f"The files of {folder}, beside a plugin of one file.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        if not any(isinstance(finder, _Neighbours) for finder in sys.meta_path):
            # First: the usual finder finds these files too, and gives them the usual loader.
            sys.meta_path.insert(0, _Neighbours())
    return name


class _Neighbours(MetaPathFinder):
    """Loads the modules of such a folder so that they find one another."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith(FOLDER):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            # Only source files: an extension module has no `__import__` that could be replaced.
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """A module whose `import` looks beside it first."""

    def exec_module(self, module: ModuleType) -> None:
        folder = (module.__package__ or "").split(".")[0]
        # `import` looks up `__import__` here: the rest of the process imports as before.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importing(folder)}
        super().exec_module(module)


def _importing(folder: str) -> Any:
    beside = Path(sys.modules[folder].__path__[0])

    def find(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        first = name.partition(".")[0]
        if level == 0 and _stands(beside, first):
            # By the full dotted name: `import a.b` must load b too, though it binds a alone.
            importlib.import_module(f"{folder}.{name}")
            return (
                builtins.__import__(f"{folder}.{name}", globals, locals, fromlist, 0)
                if fromlist
                else sys.modules[f"{folder}.{first}"]
            )
        return builtins.__import__(name, globals, locals, fromlist, level)

    return find


def _stands(folder: Path, name: str) -> bool:
    """Whether a module of that name is a file of the folder, and not one that was imported from there by its own
    name."""
    for file in (folder / f"{name}.py", folder / name / "__init__.py"):
        if file.is_file():
            # Already imported by its own name (its folder is on sys.path): a second copy would have classes of its own.
            imported = getattr(sys.modules.get(name), "__file__", None)
            return imported is None or Path(imported).resolve() != file.resolve()
    return False
