"""Loading a configuration: files, overrides, interpolation, translation, plugins, strict conversion, relations; one
report."""

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
from turnwise.config.convert import structure, to_plain
from turnwise.config.defaults import add_defaults
from turnwise.config.foreign.keys import RULES
from turnwise.config.foreign.translate import apply
from turnwise.config.masking import written_secrets
from turnwise.config.problems import Data, Path, Report, Sources, at, masked
from turnwise.config.relations import check_relations
from turnwise.config.runtimes import choose_runtime
from turnwise.config.schema import RunConfig
from turnwise.config.source.includes import Includes, check_presets, presets, read_layers
from turnwise.config.source.layers import Merged, add_presets, merge, note_reads
from turnwise.config.source.resolve import Resolved, escaped, resolve, secrets
from turnwise.errors import ConfigError, MachineError, MissingPluginError, PluginError
from turnwise.plugins import Registry


@frozen
class Loaded:
    """A configuration that can run. `notes`: what was translated. `warnings`: what has no effect, or an unlikely one.
    `lacks`: what this
    machine has not, and `missing`: what Turnwise has not (an environment that no plugin brings, a feature of a later
    version), in a configuration that is not wrong. `foreign`: it has keys of another framework.

    `sources` says where a key was written. `text` is the configuration as YAML, includes, overrides and `${…}`
    resolved: `load` reads it again from any folder. `references`: path → text, for what comes from the environment,
    whose values are never written."""

    config: RunConfig
    notes: list[str] = field(factory=list)
    warnings: list[str] = field(factory=list)
    sources: Sources = field(factory=lambda: Sources(""))
    text: str = ""
    lacks: list[str] = field(factory=list)
    references: dict[Path, str] = field(factory=dict)
    missing: list[str] = field(factory=list)
    foreign: bool = False

    def plain(self) -> Data:
        """The configuration as `to_plain` gives it, for loggers and checkpoints: `${oc.env:NAME}` stays where the
        environment was read."""
        hidden = secrets(self.references)

        def shown(value: Any, path: Path) -> Any:
            # What stands under `algorithm` was written at the top level.
            own = path[1:] if path[:1] == ("algorithm",) else path
            if (text := self.references.get(self.sources.written(own))) is not None:
                return text
            if isinstance(value, dict):
                return {k: shown(v, (*path, k)) for k, v in value.items()}
            if isinstance(value, list):
                return [shown(v, (*path, i)) for i, v in enumerate(value)]
            return masked(value, hidden) if isinstance(value, str) else value

        whole = shown(to_plain(self.config), ())
        assert isinstance(whole, dict)
        return whole


def load(
    path: FilePath | str,
    overrides: Sequence[str] = (),
    *,
    registry: Registry | None = None,
    planning: bool = False,
    checking: bool = False,
) -> Loaded:
    """Read `path` with `key=value` overrides. Raises ConfigError with every problem at once, one line each; without
    one, MachineError with everything that the configuration needs and is not here.

    `checking`: what is not here stands in `Loaded.lacks` and `Loaded.missing`. `planning`: only arithmetic is wanted
    (`turnwise plan`):
    a missing distribution of `plugins:`, an environment that is not installed and asynchronous training are
    warnings."""
    file = FilePath(path)
    registry = plugins.registry() if registry is None else registry
    found = read_layers(file, str(path))
    report = Report(Sources(str(path)), planning=planning)
    merged = merge(found.layers, overrides, report)
    for problem in found.problems:
        report.plain(problem)
    # First of all: what the plugins bring may be named in any key below.
    _declare(merged, file.parent, registry, report)
    # Before anything is resolved: `${…}` may name a preset.
    _presets(found, merged, registry, report)
    resolved = resolve(merged, report)
    # From here on a message may quote a value of the environment or under a key such as `api_key`, so every line is
    # masked. The name of a variable says more than `***`, and goes first.
    report.secrets |= written_secrets(resolved.data) | secrets(resolved.references)
    # Taken before the translation changes the data: the text is read by `load` again, and translated then.
    whole = _referring(resolved)
    config, free = _convert(resolved.data, merged, registry, report)
    if config is not None:
        # Only of a configuration that fits the schema: the relations are arithmetic on its values.
        config = choose_runtime(check_relations(config, registry, report), registry, report)
    report.raise_problems()
    assert config is not None
    # A mistake of the file goes first: `raise_problems` lists what is missing here beside it.
    if report.missing and not checking:
        raise ConfigError(report.missing, [f"machine: {line}" for line in report.lacks])
    if report.lacks and not checking:
        raise MachineError("\n".join(report.lacks))
    text = OmegaConf.to_yaml(OmegaConf.create(_portable(whole, free, file.parent)))
    return Loaded(
        config,
        report.notes,
        report.warnings,
        report.sources,
        text,
        report.lacks,
        resolved.references,
        report.missing,
        report.foreign,
    )


def _declare(merged: Merged, folder: FilePath, registry: Registry, report: Report) -> None:
    """Make the YAML's `plugins:` available first: what they bring may be named anywhere."""
    try:
        wanted = OmegaConf.select(merged.config, "plugins")
        names = [item for item in wanted if isinstance(item, str)] if OmegaConf.is_list(wanted) else []
    except OmegaConfBaseException:
        return  # reported when everything is resolved
    try:
        registry.declare(names, folder)
    except PluginError as error:
        text = str(error).removeprefix("plugins: ")
        # What is really needed of them is looked up by name later.
        if report.planning and isinstance(error, MissingPluginError):
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


def _convert(
    data: dict[str, Any], merged: Merged, registry: Registry, report: Report
) -> tuple[RunConfig | None, set[str]]:
    """Plain data to the schema (None when it does not fit), and the top-level keys that are free values."""
    # Translated first, so that everything below sees this schema's names only.
    loose = apply(RULES, data, merged.reads, registry, report)
    add_defaults(data, report)
    for role in ("actor_train", "actor_infer"):
        if not (isinstance(data.get(role), dict) and data[role].get("strategy_args")) and isinstance(
            data.get(role, {}), dict
        ):
            kind = "train_strategy" if role == "actor_train" else "inference_backend"
            names = ", ".join(e.name for e in registry.entries(kind)) or "none"
            report.error(
                (role,),
                f"{role}.strategy_args says what runs it. Installed: {names}. Fix: strategy_args: {{strategy_name:"
                " NAME}",
            )
    # Implementations before the keys at the top: a key goes to whoever has an option of its name.
    slots = find_choices(data, registry, report)
    free = give_algorithm_keys(data, slots, merged.reads, merged.included, registry, report)
    finish_choices(data, slots, registry, report, loose)
    check_environments(data, registry, report)
    config, problems = structure(RunConfig, data)
    for where, problem in problems:
        report.error(where, problem)
    return config, set(free)


def _portable(data: dict[str, Any], free: set[str], folder: FilePath) -> dict[str, Any]:
    """The data with the files under `plugins:` made absolute, and the free keys, which nothing reads any more, under
    `vars:`."""
    values = {k: v for k, v in data.items() if k in free}
    data = {k: v for k, v in data.items() if k not in free}
    if values:
        data["vars"] = {**values, **(data.get("vars") or {})}
    if isinstance(data.get("plugins"), list):
        data["plugins"] = [
            str((folder / p).resolve()) if isinstance(p, str) and p.endswith(".py") else p for p in data["plugins"]
        ]
    return data


def _referring(resolved: Resolved) -> dict[str, Any]:
    """A copy of the data in which text that looks like `${…}` stays text, and what the environment gave is asked of it
    again."""
    whole: dict[str, Any] = escaped(resolved.data)
    for path, text in resolved.references.items():
        holder = at(whole, path[:-1])
        # Else a value of its kind was written over.
        if isinstance(holder, dict | list):
            holder[path[-1]] = text
    return whole
