"""Layers, overrides and `${…}` by OmegaConf: from the files to plain data, remembering where everything was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import yaml  # type: ignore[import-untyped]
from attrs import define, field
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from turnwise.config.report import Path, Report, at
from turnwise.config.yaml_source import YamlFile, parse_value
from turnwise.errors import did_you_mean

_READS = re.compile(r"\$\{\s*(?:oc\.\w+\s*:\s*)?([A-Za-z_][\w-]*)(?=\s*[.\[},])")
_WHOLE = re.compile(r"^\s*\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\])*)\s*\}\s*$")
_MISSING = re.compile(r"Interpolation key '([^']+)' not found")
_OVERRIDE = re.compile(r"^\+{0,2}([^=]+)=(.*)$", re.DOTALL)
CHOICES = ("adv_estimator", "pg_variant", "batch_adjust_mode", "runtime", "model_source", "env_manager", "track_with")
"""Keys whose scalar is short for `{use: NAME}`; an override may go inside."""


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
    config = OmegaConf.create({})
    for layer in layers:
        report.sources.places.update(layer.places)
        config = OmegaConf.merge(config, _create(layer.data, report))
    merged = Merged(config, {str(k) for layer in layers[:-1] for k in layer.data} - {str(k) for k in own.data})
    for override in overrides:
        _override(config, override, report)
        merged.included.discard(override.lstrip("+").split("=")[0].split(".")[0].strip())
    note_reads(merged)
    return merged


def note_reads(merged: Merged) -> None:
    """Find again which top-level keys are read by `${…}`."""
    texts = _texts(OmegaConf.to_container(merged.config, resolve=False))
    merged.reads = {name for text in texts for name in _READS.findall(text)}


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
            except OmegaConfBaseException as error:
                report.unusable(
                    path, f"{value!r} is not a well-formed interpolation: {_first(error)}. Fix: `${{key}}`; write `\\${{` for the text itself"
                )
                return None
        return value

    config = OmegaConf.create(clean(data, ()))
    assert isinstance(config, DictConfig)
    return config


def _override(config: DictConfig, override: str, report: Report) -> None:
    """Apply `key=value`; dotted keys make the blocks that are missing, `a[0]` or `a.0` an element of a list."""
    label = f"override {override!r}"
    match = _OVERRIDE.match(override)
    if override.startswith("~") or not match:
        report.sources.places[(override,)] = label
        report.error(
            (override,), "an override is written key=value. Fix: for example actor_train.training_args.learning_rate=1e-6 (key=null to unset)"
        )
        return
    keys = [part for part in re.split(r"[.\[\]]+", match[1].strip()) if part]
    path: Path = ()
    for part in keys:
        path = (*path, int(part) if part.isdigit() and isinstance(at(_plain(config), path), list) else part)
    report.sources.places[path] = label
    problem = _blocked(config, path)
    if problem:
        report.error(path, problem)
        return
    try:
        value = parse_value(match[2])
        OmegaConf.update(config, ".".join(str(p) for p in path), value, merge=True, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException, IndexError, ValueError, TypeError) as error:
        report.error(path, f"{match[2]!r} cannot be put here: {_first(error)}. Fix: check the value's quotes and brackets, and the key")


def _blocked(config: DictConfig, path: Path) -> str:
    """Why nothing can be put at `path`, or the empty string; a choice by name on the way becomes a mapping with `use:`."""
    for cut in range(1, len(path)):
        value = at(_plain(config), path[:cut])
        if isinstance(value, Mapping | list) or value is None or (isinstance(value, str) and "${" in value):
            continue
        if isinstance(value, str) and path[cut - 1] in CHOICES:
            OmegaConf.update(config, ".".join(str(p) for p in path[:cut]), {"use": value}, merge=False)
            continue
        parent = ".".join(str(p) for p in path[:cut])
        return f"{parent} is {value!r}, which holds no keys. Fix: override {parent} itself"
    return ""


def _plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def add_presets(merged: Merged, known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Presets that some `${…}` names and that no key defines become keys; their names."""
    added = [name for name in sorted(merged.reads) if name in known and name not in merged.config]
    for name in added:
        merged.config[name] = dict(known[name])
    return added


def resolve(merged: Merged, report: Report) -> dict[str, Any]:
    """Plain data with every `${…}` replaced. What cannot be resolved is reported and left null."""
    if not OmegaConf.has_resolver("now"):
        register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # the newer name, from 2.4 on
        register("now", _now, use_cache=True)
    raw = _plain(merged.config)
    for key in list(raw):  # where a copied block was written, known before anything inside it is reported
        _note_copies(raw[key], (key,), report)
    return {str(key): _resolved(merged.config, key, raw[key], (key,), report, raw) for key in raw}


def _now(pattern: str = "%Y-%m-%d_%H-%M-%S") -> str:
    return datetime.now().strftime(pattern)


def _note_copies(value: Any, path: Path, report: Report) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _note_copies(inner, (*path, key), report)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _note_copies(inner, (*path, i), report)
    elif isinstance(value, str) and (match := _WHOLE.match(value)):
        report.sources.copies[path] = tuple(int(p) if p.isdigit() else p for p in re.split(r"[.\[\]]+", match[1]) if p)


def _resolved(parent: DictConfig | ListConfig, key: Any, raw: Any, path: Path, report: Report, root: Mapping[str, Any]) -> Any:
    if isinstance(raw, dict):
        inner = parent[key]
        return {k: _resolved(inner, k, v, (*path, k), report, root) for k, v in raw.items()}
    if isinstance(raw, list):
        inner = parent[key]
        return [_resolved(inner, i, v, (*path, i), report, root) for i, v in enumerate(raw)]
    if not isinstance(raw, str) or ("${" not in raw and raw != "???"):
        return raw
    try:
        value = parent[key]
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
    except OmegaConfBaseException as error:
        if raw == "???":
            report.unusable(path, f"'???' stands for a value that must be given. Fix: write it, or pass {'.'.join(map(str, path))}=…")
        elif isinstance(error, InterpolationKeyError) and (key_of := _MISSING.search(str(error))) and key_of[1] not in raw:
            report.told(path)  # what it copies is at fault, and tells
        else:
            missing = next((name for name in _READS.findall(raw) if name not in root), "")
            hint = did_you_mean(missing, root) if missing else ""
            report.unusable(path, f"{raw!r} cannot be resolved: {_first(error)}.{hint} Fix: define the key, or write the value")
    return None


def _first(error: BaseException) -> str:
    return str(error).split("\n", maxsplit=1)[0].rstrip(". ") or type(error).__name__
