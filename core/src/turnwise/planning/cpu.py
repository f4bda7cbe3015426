"""A run that has no GPU: all roles share one process and the machine's main memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.config.schema import RunConfig
from turnwise.config.updates import token_budget
from turnwise.devices import visible_gpus
from turnwise.errors import ConfigError, PluginError
from turnwise.planning import transport
from turnwise.planning.assembly import role_of, runtime_capabilities

LIBRARIES = 600_000_000
"""What a process holds once torch and transformers are imported, and a run is under way."""
STATE = ("weights", "gradients", "optimizer")


# Any: lines of the plan, as --json prints them
def peak(config: RunConfig, lines: list[dict[str, Any]], batch: Mapping[str, int]) -> dict[str, Any] | None:
    """The most bytes that the run's process holds, and the role and phase in which it does; `lines` and `batch`: of
    `estimates`. None for a run that uses GPUs, or several processes."""
    if not runtime_capabilities(config).one_process or visible_gpus():
        return None
    if any(role_of(config, line["role"]).device_mapping for line in lines):
        return None
    held = LIBRARIES + sum(batch.values())
    for line in lines:
        # The trainer's weights are the sampler's, too, where they are shared.
        state = STATE if line["phase"] != "sampling" or not _shares(config) else STATE[1:]
        held += sum(line.get(part, 0) for part in state)
    passing = {(line["role"], line["phase"]): line.get("activations", 0) + line.get("kv_cache", 0) for line in lines}
    role, phase = max(passing, key=lambda key: passing[key])
    return {"role": role, "phase": phase, "pass": passing[role, phase], "total": held + passing[role, phase]}


def _shares(config: RunConfig) -> bool:
    try:
        return transport.choose(config) == "shared"
    except (ConfigError, PluginError):  # which is reported elsewhere
        return False


def available() -> int | None:
    """Bytes of main memory that this machine has to give; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def warning(config: RunConfig, found: Mapping[str, Any] | None) -> list[str]:  # Any: a line of the plan
    """What does not fit this machine, with the keys to turn."""
    free = available()
    if found is None or free is None or found["total"] <= free:
        return []
    name, sampling = found["role"], found["phase"] == "sampling"
    role = role_of(config, name)
    budget = None if sampling else token_budget(config, role, "train" if found["phase"] == "training" else "infer")
    if sampling:
        turn = f"lower rollout_batch_size ({config.rollout_batch_size})"
    elif budget is not None:
        turn = f"lower the token budget of {name} ({budget})"
    else:
        rows = role.training_args.per_device_train_batch_size
        turn = f"lower {name}.training_args.per_device_train_batch_size ({rows}; raise gradient_accumulation_steps)"
    if role.model_args.disable_gradient_checkpointing and found["phase"] == "training":
        turn = f"{name}.model_args.disable_gradient_checkpointing: false, {turn}"
    return [
        f"main memory: about {found['total'] / 1e9:.3g} GB in {found['phase']} of {name}, of which one pass takes"
        f" {found['pass'] / 1e9:.3g}; this machine has no GPU and {free / 1e9:.3g} GB to give. Fix: {turn}, or lower"
        f" sequence_length ({config.sequence_length})"
    ]
