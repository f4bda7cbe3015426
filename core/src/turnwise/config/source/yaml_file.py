"""Reading one YAML file: plain data, the line of every key, and duplicate keys as errors."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path as FilePath
from typing import Any

import yaml  # type: ignore[import-untyped]
from attrs import define, field

from turnwise.config.problems import Path
from turnwise.config.source.limits import DEEPEST, LARGEST_FILE, LARGEST_NUMBER, MOST_MERGED, MOST_VALUES, refusal
from turnwise.errors import ConfigError

# YAML 1.2's core schema: a leading 0 makes no octal number, and `1e-6` needs no point.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """YAML without the traps of version 1.1: `1e-6` and `0o17` are numbers; `1:30`, `010`, `=` and dates are text. And
    with bounds."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.merged = 0
        self.merging: set[int] = set()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As PyYAML does, which recurses, no deeper than DEEPEST."""
        self.depth += 1
        if self.depth > DEEPEST + 2:  # the document's own mapping, and the leaf
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Bring in what `<<` names, each key once (PyYAML keeps all, 10⁸ of them for eight lines of ten aliases)."""
        if id(node) in self.merging:
            raise _refused("an anchor refers to itself. Fix: write the value out", node)
        self.merging.add(id(node))
        brought: dict[Any, Any] = {}
        own = []
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own.append((key, value))
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in reversed(sources):  # the first of a list stands
                if not isinstance(source, yaml.MappingNode):
                    raise _refused("`<<` merges mappings alone. Fix: <<: *ANCHOR of a mapping", source)
                self.flatten_mapping(source)
                self.merged += len(source.value)
                if self.merged > MOST_MERGED:
                    raise _refused(f"`<<` brings more than {MOST_MERGED} keys. {_FEWER}", key)
                brought.update(
                    {(k.tag, k.value) if isinstance(k, yaml.ScalarNode) else id(k): (k, v) for k, v in source.value}
                )
        # Own keys last, so that they win over those that are brought in.
        node.value = [*brought.values(), *own]
        self.merging.discard(id(node))

    def construct_yaml_int(self, node: Any) -> int:
        """Octal numbers as YAML 1.2 writes them, too."""
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 8) if re.match(r"[-+]?0o", text) else int(super().construct_yaml_int(node))


_FEWER = "Fix: remove anchors and aliases, or give the values to a plugin as a file"
_TOO_DEEP = f"more than {DEEPEST} blocks inside each other. Fix: write fewer"
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_PLAIN = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_SCALARS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")}
# What PyYAML resolves by the rules of YAML 1.1, taken out here.
_OWN = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:value"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
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
    own_keys: dict[int, set[int]] = field(factory=dict)
    values: int = 0


def read_yaml(file: FilePath, name: str) -> YamlFile:
    """Parse `file`, called `name` in messages. Raises ConfigError when it cannot be read, is not YAML, or is not a
    mapping."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{name}: the file has more than {LARGEST_FILE} bytes, which no configuration needs. Fix: give the"
                " run's YAML file"
            )
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = ", ".join(sorted(p.name for p in file.parent.glob("*.y*ml"))[:8]) if file.parent.is_dir() else ""
        raise ConfigError(
            f"{name}: there is no such file.{f' Beside it: {near}.' if near else ''} Fix: correct the path"
        ) from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that holds a NUL
        raise ConfigError(f"{name:.200}: cannot be read: {error!s:.200}. Fix: give a YAML file in UTF-8") from error
    found = YamlFile(name)
    data = _parse(text, found)
    if data is None and not found.problems:
        raise ConfigError(f"{name}: the file is empty. Fix: write the configuration, see docs/configuration.md")
    if found.problems:
        raise ConfigError(found.problems)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name}: a mapping of keys is needed, not a {type(data).__name__} ({data!r:.60}). Fix: write `key: value`"
            " lines"
        )
    found.data = data
    return found


def parse_value(text: str) -> Any:  # Any: YAML's data
    """The value of an override, by the same rules as in a file; the empty text is null. Raises yaml.YAMLError."""
    # Its lines are of no use: an override is named by its own text.
    holder = YamlFile("override")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else _build(loader, node, (), holder, ())
    except yaml.MarkedYAMLError as error:
        raise yaml.YAMLError(error.problem or error.context) from error
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
            if "Fix: " not in why:
                why = f"not valid YAML: {why}. Fix: check the indentation, colons and quotes of this line"
            found.problems.append(f"{found.name}:{line}: {why}")
    except yaml.YAMLError as error:
        found.problems.append(f"{found.name}: not valid YAML: {error}. Fix: save the file as UTF-8 text")
    finally:
        loader.dispose()
    return None


def _build(loader: Any, node: Any, path: Path, found: YamlFile, around: tuple[int, ...]) -> Any:
    """The data of a node; notes the line of everything inside, and the keys that stand twice."""
    line = f"{found.name}:{node.start_mark.line + 1}"
    found.places.setdefault(path, line)
    found.values += 1
    if found.values > MOST_VALUES:
        raise _refused(f"more than {MOST_VALUES} values, with every alias written out. {_FEWER}", node)
    if len(path) > DEEPEST:  # by aliases: as text it was refused by the composer
        raise _refused(_TOO_DEEP, node)
    if id(node) in around:
        found.problems.append(f"{line}: an anchor refers to itself. Fix: write the value out")
        return None
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
        raise _refused(f"the tag {node.tag!r} is not known. Fix: remove it", node)
    around = (*around, id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*path, i), found, around) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    # Before `<<` brings others, which may be written over.
    own = found.own_keys.setdefault(id(node), {id(key) for key, _ in node.value})
    loader.flatten_mapping(node)
    result: dict[Hashable, Any] = {}
    lines: dict[Hashable, int] = {}
    for key_node, value_node in node.value:
        key = _key(loader, key_node)
        here = key_node.start_mark.line + 1
        if id(key_node) in own:
            # 1 and '1' are one key of a configuration.
            twin = next((k for k in (key, str(key), _number(key)) if k in lines), None)
            if twin is not None:
                found.problems.append(
                    f"{found.name}:{here}: the key {key!r} stands here and in line {lines[twin]}. Fix: keep one"
                )
                continue
            lines[key] = here
        found.places[(*path, key)] = f"{found.name}:{here}"
        result[key] = _build(loader, value_node, (*path, key), found, around)
    return result


def _refused(why: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, why, node.start_mark)


def _scalar(loader: Any, node: Any) -> Any:
    if node.tag not in _SCALARS:
        raise _refused(
            f"the tag {node.tag!r} is not known: a value is text, a number, true, false or null. Fix: remove it", node
        )
    try:
        value = loader.construct_object(node, deep=True)
    except (ValueError, KeyError) as error:  # `!!int abc`, `!!bool abc`, a whole number of thousands of digits
        kind = node.tag.rpartition(":")[2]
        if kind == "int" and len(node.value) > 300:
            raise _refused(refusal(LARGEST_NUMBER), node) from error
        raise _refused(
            f"{node.value!r:.60} cannot be read as {kind}. Fix: correct the value, or put it in quotes", node
        ) from error
    if why := refusal(value):
        raise _refused(why, node)
    return value


def _number(key: Hashable) -> Hashable:
    return int(key) if isinstance(key, str) and re.fullmatch(r"-?\d{1,18}", key) else key


def _key(loader: Any, node: Any) -> Hashable:
    """Text and integers stay; `on`, `no`, `1.5` as keys are the text that was typed."""
    if not isinstance(node, yaml.ScalarNode):
        raise _refused("a key must be text", node)
    value = _scalar(loader, node)
    return (
        value if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)) else str(node.value)
    )
