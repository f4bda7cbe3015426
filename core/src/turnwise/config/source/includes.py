"""`defaults:` as Hydra writes it: files beside are merged under the file that names them; the rest are presets, or
refused."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from attrs import define, field

from turnwise.config.problems import Report
from turnwise.config.source.limits import MOST_FILES
from turnwise.config.source.yaml_file import YamlFile, read_yaml
from turnwise.errors import ConfigError, did_you_mean, listed
from turnwise.plugins import Registry

PRESET_KINDS = ("train_strategy", "inference_backend")


@define
class Includes:
    """The files that make up a configuration, lowest first, and the names that may still be presets (with their
    index)."""

    layers: list[YamlFile] = field(factory=list)
    presets: list[tuple[str, int]] = field(factory=list)
    problems: list[str] = field(factory=list)
    files: int = 0


class _TooManyError(ConfigError):
    """Files that include each other again and again."""


def read_layers(file: FilePath, name: str) -> Includes:
    """Read `file` and, recursively, the files that its `defaults:` name. Raises ConfigError when the file itself cannot
    be read."""
    found = Includes()
    _read(file, name, found, ())
    return found


def _read(file: FilePath, name: str, found: Includes, above: tuple[FilePath, ...]) -> None:
    found.files += 1
    # Not collected with the other problems: the files that are still to come would add theirs.
    if found.files > MOST_FILES:
        raise _TooManyError(f"{name}: defaults: reads more than {MOST_FILES} files. Fix: include each once")
    layer = read_yaml(file, name)
    entries = layer.data.pop("defaults", None)
    for i, entry in enumerate(entries if isinstance(entries, list) else [] if entries is None else [entries]):
        # A single name instead of a list has no index, and so no place of its own.
        where = layer.places.get(("defaults", i), layer.places.get(("defaults",), name))
        problem = _include(entry, i, where, file, found, (*above, file.resolve()))
        if problem:
            found.problems.append(f"{where}: $.defaults[{i}]: {problem}")
    # Behind what it includes: lowest first, and the file itself over them.
    found.layers.append(layer)


def _include(entry: Any, index: int, where: str, file: FilePath, found: Includes, above: tuple[FilePath, ...]) -> str:
    """Read one entry; why it cannot be read, or the empty string."""
    if isinstance(entry, dict) and len(entry) == 1:
        group, option = next(iter(entry.items()))
        return (
            f"{entry!r} selects from a group, which is not supported. Fix: name the file: `-"
            f" {str(group).removeprefix('override ')}/{option}@_here_`"
        )
    if not isinstance(entry, str):
        return f"{entry!r} is not the name of a file. Fix: `- ../config/envs@_here_`, a YAML file relative to this one"
    if entry == "_self_":
        return ""
    target, _, package = entry.partition("@")
    if package not in ("", "_here_", "_global_"):
        fix = f"`- {target}@_here_`, with the file's keys under `{package}:`"
        return f"{entry!r} merges under {package!r}; only the top level is supported. Fix: {fix}"
    for path in _candidates(file.parent, target):
        if not is_file(path):
            continue
        # Resolved: the same file may be named by several paths.
        if path.resolve() in above:
            return f"{entry!r} includes itself. Fix: remove the line"
        try:
            _read(path, _shown(where, target, path), found, above)
        except _TooManyError:
            raise
        except ConfigError as error:
            found.problems += error.problems
        return ""
    # Only what the user's own file names may be a preset; what an included file names must be a file.
    if not above[1:]:
        found.presets.append((target, index))
        return ""
    return f"{entry!r} is not a file beside this one. Fix: correct the path"


def is_file(path: FilePath) -> bool:
    """Whether a file is there; a name that no file can have (too long, or with a NUL) is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _candidates(folder: FilePath, target: str) -> list[FilePath]:
    names = [target] if target.endswith((".yaml", ".yml")) else [f"{target}.yaml", f"{target}.yml"]
    # Hydra's files name a path in its search path; copied together, they lie beside each other.
    return [folder / name for name in names] + [folder / FilePath(name).name for name in names]


def _shown(where: str, target: str, path: FilePath) -> str:
    """How an included file is called in messages: relative to the file that names it."""
    folder = FilePath(where.rsplit(":", 1)[0]).parent
    same = FilePath(target).name == target or path.parent == folder
    return str(folder / path.name) if same else str(folder / FilePath(target).parent / path.name)


def presets(registry: Registry) -> dict[str, dict[str, Any]]:  # Any: a plugin's options
    """The option sets by name that installed strategies ship."""
    return {
        name: options
        for kind in PRESET_KINDS
        for entry in registry.entries(kind)
        for name, options in entry.implementation.presets.items()
    }


def check_presets(found: Includes, registry: Registry, report: Report) -> None:
    """Names under `defaults:` that are no files must be presets: they need no line, so this is a note; anything else is
    an error."""
    known = presets(registry)
    for target, index in found.presets:
        name = FilePath(target).name
        path = ("defaults", index)
        if name in known:
            report.note(
                path, f"{name!r} is a preset that an installed strategy ships; `${{{name}}}` works without this line"
            )
        else:
            report.error(
                path,
                f"{target!r} is neither a file beside this one nor a preset.{did_you_mean(name, known)} Installed"
                f" presets: {listed(known)}. Fix: remove the line, put {name}.yaml beside this file, or install a"
                " strategy that ships the preset",
            )
