"""The runtime of a configuration that names none."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from turnwise.config.problems import Report
from turnwise.config.schema import ROLES, Choice, Role, RunConfig
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.declared import declared
from turnwise.errors import PluginError
from turnwise.plugins import Registry


def choose_runtime(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """The configuration with the one installed runtime of several processes, where a training role has several devices
    and no runtime is named; else as it is."""
    if report.sources.wrote(("runtime",)) or not _one_process(config.runtime, registry):
        return config
    role = next(_of_several(config), None)
    others = of_several_processes(registry)
    # Of several nobody can say which was meant, and preflight names them all.
    if role is None or len(others) != 1:
        return config
    report.note(
        (role, "device_mapping"),
        f"several devices are as many training processes, so runtime {others[0].name!r} is chosen; runtime"
        f" {config.runtime.name!r} has one",
    )
    return evolve(config, runtime=others[0])


def of_several_processes(registry: Registry) -> list[Choice]:
    """The installed runtimes whose roles have processes of their own, with their default options."""
    found = []
    for entry in registry.entries("runtime"):
        try:
            cls = entry.config_class()
            choice = Choice(entry.name, {}, None if cls is None else cls())
            if not _one_process(choice, registry):
                found.append(choice)
        except (PluginError, TypeError):  # it cannot be loaded, or has no default: that is told where it is named
            continue
    return found


def _one_process(choice: Choice, registry: Registry) -> bool:
    try:
        return declared(RuntimeCapabilities, choice.name, choice.config, registry).one_process
    except PluginError:
        return True


def _of_several(config: RunConfig) -> Iterator[str]:
    """The training roles of several devices."""
    for name, kind in ROLES.items():
        role: Role | None = getattr(config, name)
        if kind == "train_strategy" and role is not None and len(role.device_mapping) > 1:
            yield name
