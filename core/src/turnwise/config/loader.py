"""Loading a configuration: files, overrides, interpolation, translation, plugins, strict conversion, relations; one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from attrs import field, frozen
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from turnwise import plugins
from turnwise.config.algorithm import give_algorithm_keys
from turnwise.config.choices import check_environments, find_choices, finish_choices
from turnwise.config.convert import structure
from turnwise.config.defaults import add_defaults
from turnwise.config.field_keys import RULES
from turnwise.config.includes import Includes, check_presets, presets, read_layers
from turnwise.config.relations import check_relations
from turnwise.config.report import Report, Sources
from turnwise.config.resolve import Merged, add_presets, merge, note_reads, resolve
from turnwise.config.schema import RunConfig
from turnwise.config.translate import apply
from turnwise.errors import MachineError, MissingPluginError, PluginError
from turnwise.plugins import Registry


@frozen
class Loaded:
    """A configuration that can run. `notes`: what was translated. `warnings`: what has no effect, or an unlikely one. `lacks`: what is not here
    (an environment that is not installed, a feature of a later version), in a configuration that is not wrong.

    `sources` says where a key was written. `text` is the configuration as YAML, includes, overrides and `${…}` resolved: `load` reads
    it again from any folder."""

    config: RunConfig
    notes: list[str] = field(factory=list)
    warnings: list[str] = field(factory=list)
    sources: Sources = field(factory=lambda: Sources(""))
    text: str = ""
    lacks: list[str] = field(factory=list)


def load(
    path: FilePath | str, overrides: Sequence[str] = (), *, registry: Registry | None = None, planning: bool = False, checking: bool = False
) -> Loaded:
    """Read `path` with `key=value` overrides. Raises ConfigError with every problem at once, one line each; without one, MachineError with
    everything that the configuration needs and is not here.

    `checking`: what is not here stands in `Loaded.lacks` instead. `planning`: only arithmetic is wanted (`turnwise plan`), so that a missing
    distribution of `plugins:`, an environment that is not installed and asynchronous training are warnings."""
    file = FilePath(path)
    registry = plugins.registry() if registry is None else registry
    found = read_layers(file, str(path))
    report = Report(Sources(str(path)), planning=planning)
    merged = merge(found.layers, overrides, report)
    for problem in found.problems:
        report.plain(problem)
    _declare(merged, file.parent, registry, report)
    _presets(found, merged, registry, report)
    data = resolve(merged, report)
    whole = _escaped(data)
    config, free = _convert(data, merged, registry, report)
    if config is not None:
        config = check_relations(config, registry, report)
    report.raise_problems()
    assert config is not None
    if report.lacks and not checking:
        raise MachineError("\n".join(report.lacks))
    text = OmegaConf.to_yaml(OmegaConf.create(_portable(whole, free, file.parent)))
    return Loaded(config, report.notes, report.warnings, report.sources, text, report.lacks)


def _declare(merged: Merged, folder: FilePath, registry: Registry, report: Report) -> None:
    """Make the YAML's `plugins:` available first: what they bring may be named anywhere."""
    try:
        wanted = OmegaConf.select(merged.config, "plugins")
        names = [item for item in wanted if isinstance(item, str)] if OmegaConf.is_list(wanted) else []
    except OmegaConfBaseException:
        return  # told when everything is resolved
    try:
        registry.declare(names, folder)
    except PluginError as error:
        text = str(error).removeprefix("plugins: ")
        if report.planning and isinstance(error, MissingPluginError):  # what is really needed of them is looked up by name later
            report.warn(("plugins",), text)
            return
        report.cause = error.__cause__ or error
        report.error(("plugins",), text)


def _presets(found: Includes, merged: Merged, registry: Registry, report: Report) -> None:
    known = presets(registry)
    check_presets(found, registry, report)
    for name in add_presets(merged, known):
        report.notes.append(f"{report.sources.root}: ${{{name}}} is the preset of an installed strategy")
    note_reads(merged)


def _convert(data: dict[str, Any], merged: Merged, registry: Registry, report: Report) -> tuple[RunConfig | None, set[str]]:
    """Plain data to the schema (None when it does not fit), and the top-level keys that are free values."""
    loose = apply(RULES, data, merged.reads, registry, report)
    add_defaults(data, report)
    for role in ("actor_train", "actor_infer"):
        if not (isinstance(data.get(role), dict) and data[role].get("strategy_args")) and isinstance(data.get(role, {}), dict):
            kind = "train_strategy" if role == "actor_train" else "inference_backend"
            names = ", ".join(e.name for e in registry.entries(kind)) or "none"
            report.error((role,), f"{role}.strategy_args says what runs it. Installed: {names}. Fix: strategy_args: {{strategy_name: NAME}}")
    slots = find_choices(data, registry, report)
    free = give_algorithm_keys(data, slots, merged.reads, merged.included, report)
    finish_choices(data, slots, registry, report, loose)
    check_environments(data, registry, report)
    config, problems = structure(RunConfig, data)
    for where, problem in problems:
        report.error(where, problem)
    return config, set(free)


def _portable(data: dict[str, Any], free: set[str], folder: FilePath) -> dict[str, Any]:
    """The data with the files under `plugins:` made absolute, and the free keys, which nothing reads any more, under `vars:`."""
    values = {k: v for k, v in data.items() if k in free}
    data = {k: v for k, v in data.items() if k not in free}
    if values:
        data["vars"] = {**values, **(data.get("vars") or {})}
    if isinstance(data.get("plugins"), list):
        data["plugins"] = [str((folder / p).resolve()) if isinstance(p, str) and p.endswith(".py") else p for p in data["plugins"]]
    return data


def _escaped(value: Any) -> Any:
    """A copy in which text that looks like `${…}` stays text."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
