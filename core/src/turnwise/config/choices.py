"""Choices of implementations: looked up in the registry, their options structured to the plugin's own config class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import define

from turnwise.config.annotations import mistyped
from turnwise.config.convert import describe, structure, unknown_key
from turnwise.config.problems import Data, Path, Report, at
from turnwise.config.schema import MANAGERS, ROLES, UNKNOWN, Choice, CustomEnv, RunConfig
from turnwise.errors import PluginError, UnknownNameError
from turnwise.plugins import Entry, Registry

TOP_LEVEL = {
    "runtime": "runtime",
    "model_source": "model_source",
    "adv_estimator": "advantage_estimator",
    "pg_variant": "policy_loss",
    "batch_adjust_mode": "batch_adjust",
    "group_filters": "group_filter",
    "track_with": "logger",
    "baselines": "inference_backend",
}
"""Top-level key → kind of the implementation that it names."""

STRATEGY_ALIASES = {
    "tp_size": ("tensor_model_parallel_size", "tensor_parallel_size"),
    "pp_size": ("pipeline_model_parallel_size", "pipeline_parallel_size"),
}
"""Short option names of some frameworks → the option, under the first name that the strategy has."""


@define(eq=False)
class Slot:
    """One choice that the configuration makes. `inside`: where its options are written."""

    path: Path
    kind: str
    entry: Entry
    config_class: Any
    options: dict[str, Any]
    inside: Path

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the options, where the implementation declares them."""
        return tuple(a.name for a in attrs.fields(self.config_class) if a.init) if self.config_class is not None else ()


def find_choices(data: Data, registry: Registry, report: Report) -> list[Slot]:
    """Look up every implementation that `data` names, defaults included. What is wrong is reported and has no slot."""
    slots: list[Slot | None] = []
    for key, kind in TOP_LEVEL.items():
        default = _default(RunConfig, key)
        several = isinstance(default, tuple)
        # A default goes the way of a name that was written: where it is not installed, that is reported too.
        value = data.setdefault(key, [c.name for c in default] if isinstance(default, tuple) else default.name)
        # One name instead of a list.
        if several and isinstance(value, str | Mapping):
            data[key] = value = [value]
            # A message about the list's only entry names the line of the key.
            report.sources.moved[(key, 0)] = (key,)
        if several and not isinstance(value, list):
            report.unusable((key,), f"{value!r} is neither a name nor a list of names. Fix: [{key}]")
            data[key] = []
        elif several:
            slots += [_slot(data, (key, i), kind, registry, report) for i in range(len(value))]
        else:
            slots.append(_slot(data, (key,), kind, registry, report))
    for role, kind in ROLES.items():
        if isinstance(data.get(role), dict) and data[role].get("strategy_args") is not None:
            slots.append(_slot(data, (role, "strategy_args"), kind, registry, report))
    for tag, env in _environments(data):
        env.setdefault("env_manager", _default(CustomEnv, "env_manager").name)
        slots.append(_slot(data, ("custom_envs", tag, "env_manager"), "env_manager", registry, report))
        named = env.get("samplers")
        for name in list(named) if isinstance(named, dict) else ():
            slots.append(_slot(data, ("custom_envs", tag, "samplers", name), "inference_backend", registry, report))
    return [slot for slot in slots if slot is not None]


def _default(cls: type, key: str) -> Any:
    default: Any = attrs.fields_dict(cls)[key].default
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


def _environments(data: Mapping[str, Any]) -> Iterable[tuple[Any, dict[str, Any]]]:
    environments = data.get("custom_envs")
    if isinstance(environments, dict):
        yield from ((tag, env) for tag, env in environments.items() if isinstance(env, dict))


def _slot(data: dict[str, Any], path: Path, kind: str, registry: Registry, report: Report) -> Slot | None:
    value = at(data, path)
    holder = at(data, path[:-1])
    # So that the conversion finds no second fault in what is reported here.
    holder[path[-1]] = Choice(UNKNOWN)
    read = _read(value, path, report)
    if read is None:
        return None
    name, options, inside = read
    try:
        entry = registry.find(kind, name)
        cls = entry.config_class()
        if cls is not None and not attrs.has(cls):
            raise PluginError(
                f"{kind} {name!r} (from {entry.distribution}): its config class {cls!r} is no attrs class. Fix: repair"
                " the plugin."
            )
        return Slot(path, kind, entry, cls, dict(options), inside)
    except PluginError as error:
        # The first cause alone is chained: `--debug` shows one traceback, and later mistakes often follow from the
        # first.
        report.cause = report.cause or error
        # Blame the line of the name, not the first line of the block.
        named = next((key for key in ("use", "strategy_name") if isinstance(value, Mapping) and key in value), None)
        report.error((*path, named) if named else path, str(error))
        return None


def _read(value: Any, path: Path, report: Report) -> tuple[str, Mapping[str, Any], Path] | None:
    """(name, options, where the options are written), or None after a report."""
    if isinstance(value, str):
        return value, {}, path
    if not isinstance(value, Mapping):
        report.error(path, f"{value!r} names no implementation; {describe(Choice)} is needed. Fix: write the name")
        return None
    if "strategy_name" in value:
        name, options, inside = value["strategy_name"], value.get("strategy_config"), (*path, "strategy_config")
        for extra in sorted(set(map(str, value)) - {"strategy_name", "strategy_config"}):
            report.error((*path, extra), unknown_key(extra, ["strategy_name", "strategy_config"]))
    else:
        name, options, inside = value.get("use"), {str(k): v for k, v in value.items() if k != "use"}, path
    if not isinstance(name, str):
        key = "strategy_name" if path[-1] == "strategy_args" else "use"
        report.error(path, f"`{key}:` must name the implementation, it is {name!r}. Fix: {key}: NAME")
        return None
    if options is not None and not isinstance(options, Mapping):
        report.error(
            inside, f"{options!r} is not a mapping of options. Fix: write `option: value` lines, or remove the key"
        )
        return None
    return name, options or {}, inside


def finish_choices(data: Data, slots: Iterable[Slot], registry: Registry, report: Report, loose: set[Path]) -> None:
    """Check the options of every slot and put the finished Choice into `data`.

    `loose`: options that a translation brought; where the implementation has no such option that is a warning."""
    for slot in slots:
        # The user wrote no such name: what the translation brought and this implementation lacks is no mistake of the
        # file.
        for name in [
            n
            for n in slot.options
            if (*slot.path, n) in loose and slot.config_class is not None and n not in slot.fields
        ]:
            report.warn(
                (*slot.inside, name),
                f"has no effect: {slot.kind.replace('_', ' ')} {slot.entry.name!r} has no option {name!r}",
            )
            del slot.options[name]
        config = _structured(slot, registry, report)
        at(data, slot.path[:-1])[slot.path[-1]] = Choice(slot.entry.name, slot.options, config)


def _structured(slot: Slot, registry: Registry, report: Report) -> Any:
    if slot.config_class is None:
        if slot.options:
            _check_signature(slot.entry, slot.options, slot.inside, registry, report)
        return None
    options = _named_as_the_engine_does(slot, report)
    # The class collects what it does not know; the engine's own class checks it.
    if "engine_args" in slot.fields:
        rest = {k: v for k, v in options.items() if k not in slot.fields}
        options = {k: v for k, v in options.items() if k in slot.fields}
        if rest:
            options["engine_args"] = {**(options.get("engine_args") or {}), **rest}
            report.sources.moved.update({(*slot.inside, "engine_args", k): (*slot.inside, k) for k in rest})
    config, problems = structure(slot.config_class, options)
    for path, text in problems:
        report.error((*slot.inside, *path), text)
    return config


def _named_as_the_engine_does(slot: Slot, report: Report) -> dict[str, Any]:
    options = dict(slot.options)
    for short, names in STRATEGY_ALIASES.items():
        # vLLM and Megatron name it differently: by the first that this implementation has.
        full = next((n for n in names if n in slot.fields), None)
        if slot.kind not in ROLES.values() or short not in options or short in slot.fields or full is None:
            continue
        report.note((*slot.inside, short), f"is {full} of {slot.entry.name!r}")
        if full in options:
            report.error((*slot.inside, short), f"{short} and {full} are the same option. Fix: keep one")
        report.sources.moved[(*slot.inside, full)] = (*slot.inside, short)
        options[full] = options.pop(short)
    slot.options = options
    return dict(options)


def _check_signature(entry: Entry, options: Mapping[str, Any], path: Path, registry: Registry, report: Report) -> None:
    # The signature is known only by importing it, and that needs what is missing.
    if entry.missing:
        report.warn(
            path,
            f"not checked: {entry.kind.replace('_', ' ')} {entry.name!r} needs {', '.join(entry.missing)}, not"
            " installed here",
        )
        return
    try:
        registry.check_options(entry, options)
    except PluginError as error:
        report.cause = report.cause or error
        option = next((o for o in options if f"no option {o!r}" in str(error)), None)
        report.error((*path, option) if option else path, str(error))
        return
    for where, text in mistyped(entry.target(), options):
        report.error((*path, *where), text)


def check_environments(data: Data, registry: Registry, report: Report) -> None:
    """Look up the environments of the tags that are played, and compare `env_config` with their constructors."""
    played = _played(data)
    for tag, env in _environments(data):
        name, options = env.get("env_type"), env.get("env_config") or {}
        # A tag that is written down and not played needs nothing installed.
        if (played and tag not in played) or not isinstance(name, str) or not isinstance(options, Mapping):
            continue
        path: Path = ("custom_envs", tag)
        try:
            entry = registry.find("environment", name)
        except PluginError as error:
            if isinstance(error, UnknownNameError) and not error.misspelt:
                report.miss((*path, "env_type"), str(error), "`plan` works without it, and does not check env_config")
                continue
            report.cause = report.cause or error
            report.error((*path, "env_type"), str(error))
            continue
        _check_signature(
            entry,
            {str(k): v for k, v in options.items()},
            (*path, "env_config") if options else (*path, "env_type"),
            registry,
            report,
        )


def _played(data: Mapping[str, Any]) -> set[str]:
    tags = [at(data, (manager, "tags")) for manager in MANAGERS]
    return {tag for several in tags if isinstance(several, list) for tag in several if isinstance(tag, str)}
