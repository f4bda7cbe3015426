"""Reading one YAML file: plain data, the line of every key, and duplicate keys as errors."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path as FilePath
from typing import Any

import yaml  # type: ignore[import-untyped]
from attrs import define, field

from turnwise.config.report import Path
from turnwise.errors import ConfigError

_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """YAML without the traps of version 1.1: `1e-6` is a number; `1:30`, `010` and dates are text."""


_PLAIN = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_OWN = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


@define
class YamlFile:
    """A parsed file: its data, the place `file:line` of every path, and what is wrong with it."""

    name: str
    data: dict[Any, Any] = field(factory=dict)
    places: dict[Path, str] = field(factory=dict)
    problems: list[str] = field(factory=list)
    own_keys: dict[int, list[Any]] = field(factory=dict)


def read_yaml(file: FilePath, name: str) -> YamlFile:
    """Parse `file`, called `name` in messages. Raises ConfigError when it cannot be read, is not YAML, or is not a mapping."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = ", ".join(sorted(p.name for p in file.parent.glob("*.y*ml"))[:8]) if file.parent.is_dir() else ""
        raise ConfigError(f"{name}: there is no such file.{f' Beside it: {near}.' if near else ''} Fix: correct the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}. Fix: give a YAML file in UTF-8") from error
    found = YamlFile(name)
    data = _parse(text, found)
    if data is None and not found.problems:
        raise ConfigError(f"{name}: the file is empty. Fix: write the configuration, see docs/configuration.md")
    if found.problems:
        raise ConfigError(found.problems)
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a mapping of keys is needed, not a {type(data).__name__} ({data!r:.60}). Fix: write `key: value` lines")
    found.data = data
    return found


def parse_value(text: str) -> Any:
    """The value of an override, by the same rules as in a file; the empty text is null. Raises yaml.YAMLError."""
    holder = YamlFile("override")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else _build(loader, node, (), holder, ())
    finally:
        loader.dispose()
    if holder.problems:
        raise yaml.YAMLError(holder.problems[0])
    return value


def _parse(text: str, found: YamlFile) -> Any:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        bad = f"the character {text[error.position]!r} is not allowed"
        found.problems.append(f"{found.name}:{line}: not valid YAML: {bad}. Fix: save the file as UTF-8 text")
        return None
    try:
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, (), found, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        if "'\\t'" in str(error.problem):
            found.problems.append(f"{found.name}:{line}: a tab is used for indentation. Fix: indent with spaces")
        else:
            why = ", ".join(part for part in (error.context, error.problem) if part)
            found.problems.append(f"{found.name}:{line}: not valid YAML: {why}. Fix: check the indentation, colons and quotes of this line")
    except yaml.YAMLError as error:
        found.problems.append(f"{found.name}: not valid YAML: {error}. Fix: save the file as UTF-8 text")
    finally:
        loader.dispose()
    return None


def _build(loader: Any, node: Any, path: Path, found: YamlFile, around: tuple[int, ...]) -> Any:
    """The data of a node; notes the line of everything inside, and the keys that stand twice."""
    line = f"{found.name}:{node.start_mark.line + 1}"
    found.places.setdefault(path, line)
    if id(node) in around:
        found.problems.append(f"{line}: an anchor refers to itself. Fix: write the value out")
        return None
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
        raise yaml.constructor.ConstructorError(None, None, f"could not determine a constructor for the tag {node.tag!r}", node.start_mark)
    around = (*around, id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*path, i), found, around) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    own = found.own_keys.setdefault(id(node), [key for key, _ in node.value])  # before `<<` brings others, which may be written over
    loader.flatten_mapping(node)
    result: dict[Hashable, Any] = {}
    lines: dict[Hashable, int] = {}
    for key_node, value_node in node.value:
        key = _key(loader, key_node)
        here = key_node.start_mark.line + 1
        if key_node in own and key in lines:
            found.problems.append(f"{found.name}:{here}: the key {key!r} stands here and in line {lines[key]}. Fix: keep one")
        if key_node in own:
            lines[key] = here
        found.places[(*path, key)] = f"{found.name}:{here}"
        result[key] = _build(loader, value_node, (*path, key), found, around)
    return result


def _scalar(loader: Any, node: Any) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # a whole number of thousands of digits
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def _key(loader: Any, node: Any) -> Hashable:
    """Text and integers stay; `on`, `no`, `1.5` as keys are the text that was typed."""
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key must be text", node.start_mark)
    value = _scalar(loader, node)
    return value if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)) else str(node.value)
