"""Layers and overrides, merged by OmegaConf: one configuration from the files, remembering where everything was
written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]
from attrs import define, field
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from turnwise.config.masking import secrets_of, shown_override
from turnwise.config.problems import Path, Report, at
from turnwise.config.source.limits import DEEPEST, MOST_VALUES
from turnwise.config.source.yaml_file import YamlFile, parse_value

READS = re.compile(r"\$\{\s*(?:oc\.\w+\s*:\s*)?([A-Za-z_][\w-]*)(?=\s*[.\[},])")
"""The top-level keys that a text names."""
_OVERRIDE = re.compile(r"^\+{0,2}([^=]+)=(.*)$", re.DOTALL)
CHOICES = ("adv_estimator", "pg_variant", "batch_adjust_mode", "runtime", "model_source", "env_manager", "track_with")
"""Keys whose scalar is short for `{use: NAME}`; an override may go inside."""
NAMES = ("use", "strategy_name")
"""What names the implementation in the mapping of a choice."""


@define
class Merged:
    """The configuration before interpolation. `included`: top-level keys that only an included file has."""

    config: DictConfig
    included: set[str] = field(factory=set)
    reads: set[str] = field(factory=set)
    """Top-level keys that some `${…}` reads."""


def merge(layers: Sequence[YamlFile], overrides: Sequence[str], report: Report) -> Merged:
    """Merge the layers, lowest first, then the overrides in their order."""
    own = layers[-1]
    config: DictConfig = OmegaConf.create({})
    for layer in layers:
        # OmegaConf merges mappings key by key: what is to be replaced is emptied first, or its old options would stay.
        for path in list(_replaced(in_plain(config), layer.data, ())):
            _remove(config, path)
            report.sources.forget(path)
        report.sources.places.update(layer.places)
        config = _over(config, _create(layer.data, report), layer, report)
    if sum(layer.values for layer in layers) > MOST_VALUES:
        report.plain(f"{own.name}: more than {MOST_VALUES} values, with the included files. Fix: include fewer")
        report.raise_problems()
    merged = Merged(config, {str(k) for layer in layers[:-1] for k in layer.data} - {str(k) for k in own.data})
    for override in overrides:
        _override(config, override, report)
        # A key that the user overrides is meant: if nobody knows it, it is no longer a free value of an included file.
        merged.included.discard(override.lstrip("+").split("=")[0].split(".")[0].strip())
    note_reads(merged)
    return merged


def _over(config: DictConfig, created: DictConfig, layer: YamlFile, report: Report) -> DictConfig:
    """A layer over those below. A block that is one `${…}` below is copied and merged, if it is of the same kind."""
    # First as it is; then, one after the other, without what stands below as `${…}` and blocks the merge.
    for path in [(), *_interpolated(in_plain(config), layer.data, ())]:
        if path:
            _remove(config, path)
        try:
            merged = OmegaConf.merge(config, created)
            assert isinstance(merged, DictConfig)
            return merged
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            why = first_line(error)
    report.plain(
        f"{layer.name}: cannot be merged with the files that it includes: {why}. Fix: give the keys one type in all of"
        " them"
    )
    return config


def _interpolated(below: Any, over: Any, path: Path) -> Iterator[Path]:
    """Where a block stands over an interpolation."""
    if isinstance(below, str) and "${" in below and isinstance(over, dict | list):
        yield path
    elif isinstance(below, dict) and isinstance(over, dict):
        for key in over:
            yield from _interpolated(below.get(key), over[key], (*path, key))


def note_reads(merged: Merged) -> None:
    """Find again which top-level keys are read by `${…}`."""
    texts = _texts(OmegaConf.to_container(merged.config, resolve=False))
    merged.reads = {name for text in texts for name in READS.findall(text)}


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        if "${" in data:
            yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _texts(value)
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value)


def _create(data: dict[Any, Any], report: Report) -> DictConfig:
    """The data as OmegaConf holds it, without the values whose `${…}` is not well formed (they are reported)."""

    def clean(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {k: clean(v, (*path, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v, (*path, i)) for i, v in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.create({"value": value})
            except (OmegaConfBaseException, RecursionError) as error:
                why = "too many inside each other" if isinstance(error, RecursionError) else first_line(error)
                report.unusable(
                    path,
                    f"{value!r} is not a well-formed interpolation: {why}. Fix: `${{key}}`; write `\\${{` for the text"
                    " itself",
                )
                return None
        return value

    try:
        config = OmegaConf.create(data)
    except (OmegaConfBaseException, RecursionError):  # value by value it takes three times as long
        config = OmegaConf.create(clean(data, ()))
    assert isinstance(config, DictConfig)
    return config


def _replaced(below: Any, over: Any, path: Path) -> Iterator[Path]:
    """Where `over` takes the place of what is below, instead of being merged with it: another kind of value, or a
    choice of another name."""
    if not isinstance(below, Mapping) or not isinstance(over, Mapping):
        if (
            isinstance(below, Mapping | list)
            and isinstance(over, Mapping | list)
            and isinstance(below, Mapping) != isinstance(over, Mapping)
        ):
            yield path
        return
    if path and (path[-1] in CHOICES or path[-1] == "strategy_args"):
        names = [next((block[key] for key in NAMES if key in block), None) for block in (below, over)]
        # The options of the one are not the other's.
        if None not in names and names[0] != names[1]:
            yield path
            return
    for key in over:
        if key in below:
            yield from _replaced(below[key], over[key], (*path, key))


def _remove(config: DictConfig, path: Path) -> None:
    holder: Any = config
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = None  # keeps the key's place


def _override(config: DictConfig, override: str, report: Report) -> None:
    """Apply `key=value`; dotted keys make the blocks that are missing, `a[0]` or `a.0` an element of a list."""
    # Every message about a value names the override that brought it, and may quote what could not be read.
    label = f"override {shown_override(override)!r}"
    report.secrets |= secrets_of(override)
    match = _OVERRIDE.match(override)
    if override.startswith("~") or not match:
        shown = shown_override(override)
        report.sources.places[(shown,)] = label
        report.error(
            (shown,),
            "an override is written key=value. Fix: for example actor_train.training_args.learning_rate=1e-6 (key=null"
            " to unset)",
        )
        return
    keys = [part for part in re.split(r"[.\[\]]+", match[1].strip()) if part]
    path: Path = ()
    for part in keys:
        path = (*path, int(part) if part.isdecimal() and isinstance(at(in_plain(config), path), list) else part)
    for cut in range(1, len(path)):  # blocks that the override makes
        if at(in_plain(config), path[:cut]) is None:
            report.sources.places.setdefault(path[:cut], label)
    report.sources.places[path] = label
    problem = _blocked(config, path)
    if problem:
        report.error(path, problem)
        return
    try:
        # By the rules of a file, not by OmegaConf's grammar: `1e-6` is the same number in both places.
        value = parse_value(match[2])
        # Emptied before the update, which would merge the options of one choice into another.
        replaced = list(_replaced(at(in_plain(config), path), value, path))
        for where in replaced:
            _remove(config, where)
        for where in [*replaced, *_leaves(value, path)]:
            report.sources.forget(where)
            report.sources.places[where] = label
        report.sources.places[path] = label
        OmegaConf.update(config, ".".join(str(p) for p in path), value, merge=path not in replaced, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException, IndexError, ValueError, TypeError) as error:
        why = first_line(error)
        fix = "" if "Fix: " in why else ". Fix: check the value's quotes and brackets, and the key"
        report.error(path, f"{match[2]!r} cannot be put here: {why}{fix}")


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    """The paths that an override writes: everything inside a mapping, and a list as a whole."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path


def _blocked(config: DictConfig, path: Path) -> str:
    """Why nothing can be put at `path`, or the empty string; a choice by name on the way becomes a mapping with
    `use:`."""
    if len(path) > DEEPEST:
        return f"more than {DEEPEST} blocks inside each other. Fix: write fewer"
    for cut in range(1, len(path)):
        value = at(in_plain(config), path[:cut])
        if isinstance(value, Mapping | list) or value is None or (isinstance(value, str) and "${" in value):
            continue
        if isinstance(value, str) and path[cut - 1] in CHOICES:
            OmegaConf.update(config, ".".join(str(p) for p in path[:cut]), {"use": value}, merge=False)
            continue
        parent = ".".join(str(p) for p in path[:cut])
        return f"{parent} is {value!r}, which holds no keys. Fix: override {parent} itself"
    return ""


def in_plain(config: DictConfig) -> Any:  # Any: YAML's data
    """As dicts and lists, with `${…}` as it is written."""
    return OmegaConf.to_container(config, resolve=False)


def add_presets(merged: Merged, known: Mapping[str, Mapping[str, Any]]) -> list[str]:  # Any: a plugin's options
    """Presets that some `${…}` names and that no key defines become keys; their names."""
    added = [name for name in sorted(merged.reads) if name in known and name not in merged.config]
    for name in added:
        merged.config[name] = dict(known[name])
    return added


def first_line(error: BaseException) -> str:
    """The first line of what a library says."""
    return str(error).split("\n", maxsplit=1)[0].rstrip(". ") or type(error).__name__
