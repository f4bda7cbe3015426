"""What stands against the devices that a configuration gives its roles."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.config.runtimes import of_several_processes
from turnwise.config.schema import RunConfig
from turnwise.config.updates import strategy_capabilities
from turnwise.devices import visible_gpus
from turnwise.errors import pip_install
from turnwise.planning import assembly
from turnwise.plugins import registry

_FEWER = "Fix: use devices that are here"


def device_problems(config: RunConfig, role: str) -> list[str]:
    """GPUs that this machine lacks, where it is this machine's that the runtime would give to the role."""
    mapping = assembly.role_of(config, role).device_mapping
    if not assembly.runtime_capabilities(config).counts_devices:
        return []
    found = visible_gpus()
    # Devices are numbered from 0, and a role may leave some out: the largest number says how many there must be.
    if mapping and max(mapping) >= found:
        needed = f"{role}: device_mapping needs {max(mapping) + 1} GPU{'s' if max(mapping) else ''}, found {found}"
        return [f"{needed}. {_FEWER}"]
    least = 0 if mapping else assembly.runtime_capabilities(config).least_devices
    if least > found:
        needed = (
            f"{role}: runtime {config.runtime.name!r} gives a role without device_mapping {least}"
            f" GPU{'s' if least > 1 else ''}, found {found}"
        )
        return [f"{needed}. {_FEWER}"]
    return []


def missing_gpus(config: RunConfig) -> list[str]:
    """GPUs that the run expects of a node, where its nodes are this machine and its devices are GPUs."""
    expected, found = config.num_gpus_per_node or 0, visible_gpus()
    if expected <= found or not assembly.runtime_capabilities(config).counts_devices:
        return []
    return [
        f"num_gpus_per_node: {expected} GPUs are expected, found {found}. Fix: the number there is, or remove the key"
    ]


def undividable(config: RunConfig, role: str, reported: Sequence[str]) -> list[str]:
    """Devices that hold no whole number of the engine's copies, if the engine's own check has not reported it."""
    mapping = assembly.role_of(config, role).device_mapping
    sampler = role == "actor_infer"
    known = assembly.backend_capabilities(config) if sampler else strategy_capabilities(assembly.role_of(config, role))
    size = known.data_parallel_size
    given = 0 if mapping or role != "actor_infer" else devices_given(config)
    if size is None or not (mapping or given):
        return []
    try:
        size(len(mapping) or given)
    except ValueError as error:
        has = (
            f" is missing: runtime {config.runtime.name!r} gives such a role {given} GPU{'s' if given > 1 else ''}, and"
            if given
            else ":"
        )
        return (
            []
            if any(str(error) in line for line in reported)
            else [f"$.{role}.device_mapping{has} {error}. Fix: other sizes, or other devices"]
        )
    return []


def devices_given(config: RunConfig) -> int:
    """GPUs that the runtime gives to a sampler that names none; 0: those that the engine finds, or none, as where it is
    attached to."""
    return len(assembly.devices(config)["actor_infer"])


def sleepless(config: RunConfig, role: str) -> list[str]:
    """A training role on GPUs that the sampler does not leave when its turn is over."""
    shared = assembly.turns(config).get(role)
    # Where numbers are processes, or a cluster elsewhere, they are no GPUs of this machine.
    if not shared or not assembly.runtime_capabilities(config).counts_devices:
        return []
    why = assembly.backend_capabilities(config).cannot_sleep
    number = ", ".join(map(str, shared))
    return [f"$.actor_infer.device_mapping: {role} uses device {number} in turns with it, and {why}"] if why else []


def notes(config: RunConfig) -> list[str]:
    """What is chosen because of the devices, though nobody wrote it."""
    shared = assembly.turns(config)
    if not shared or not assembly.backend_capabilities(config).sleeps_on_demand:
        return []
    numbers = ", ".join(map(str, sorted({number for mine in shared.values() for number in mine})))
    who = " and ".join(name for name in shared if name != "reference" or assembly.needs_reference(config))
    return [
        f"$.actor_infer: shares device {numbers} with {who}, so its engine is started to sleep while others work there"
    ]


def at_the_same_time(config: RunConfig, role: str) -> list[str]:
    """A training role on devices of the sampler, which plays while it trains."""
    ratio, devices = config.async_generation_ratio, assembly.devices(config)
    shared = sorted(set(devices[role]) & set(devices["actor_infer"])) if ratio and role != "actor_infer" else []
    if not shared:
        return []
    number = ", ".join(map(str, shared))
    # Both sides are named as keys, also where nobody wrote them: they are what can be written.
    sampler, trainer = (
        f"$.{name}.device_mapping"
        + ("" if assembly.role_of(config, name).device_mapping else " (the runtime's choice)")
        for name in ("actor_infer", role)
    )
    return [
        f"$.async_generation_ratio: {ratio} plays while the trainer trains, and {sampler} shares device {number} with"
        f" {trainer}. Fix: devices of its own for actor_infer, or async_generation_ratio: 0"
    ]


def one_process(config: RunConfig, role: str) -> list[str]:
    """A training role of several devices where the runtime has one process, which drives one device."""
    mapping = assembly.role_of(config, role).device_mapping
    if role == "actor_infer" or len(mapping) < 2 or not assembly.runtime_capabilities(config).one_process:
        return []
    others = [choice.name for choice in of_several_processes(registry())]
    fix = f"runtime: {' or '.join(others)}" if others else f"{pip_install('turnwise-ray[ray]')} and runtime: ray"
    return [
        f"$.{role}.device_mapping: {len(mapping)} devices are as many training processes, and runtime"
        f" {config.runtime.name!r} has one process. Fix: {fix}; or one device"
    ]
