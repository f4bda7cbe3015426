"""Algorithm keys: a top-level key goes to every chosen implementation that has an option of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from turnwise.config.choices import TOP_LEVEL, Slot
from turnwise.config.convert import unknown_key
from turnwise.config.problems import Data, Report, dotted
from turnwise.config.schema import RunConfig
from turnwise.errors import PluginError
from turnwise.plugins import Registry

CHOOSERS = ("adv_estimator", "pg_variant", "batch_adjust_mode", "group_filters")
"""The choices whose options may stand at the top level."""

SHARED = (
    "gamma", "lambd", "whiten_advantages", "advantage_clip", "reward_normalization", "reward_clip", "ratio_type", "ppo_epochs",
    "entropy_loss_coef", "loss_agg_mode", "loss_agg_unit", "loss_scale_factor", "init_kl_coef", "kl_penalty", "kl_loss_coef",
    "kl_loss_type", "value_clip",
)  # fmt: skip
"""Keys of the core that implementations may have too: they get the value when the YAML gives it."""

OF_ESTIMATORS = ("lambd",)
"""Keys of the core that nothing but an estimator reads."""


def give_algorithm_keys(
    data: Data, slots: Sequence[Slot], reads: set[str], included: set[str], registry: Registry, report: Report
) -> Data:
    """Take every top-level key that is not the schema's out of `data`: to the implementations, to `vars`, or into the
    report.

    Returns the free keys."""
    schema = [a.name for a in attrs.fields(RunConfig)]
    chosen = [slot for slot in slots if slot.path[0] in CHOOSERS]
    algorithm: dict[str, Any] = {}
    free: dict[str, Any] = {}
    # A copy of the keys: free ones are taken out of `data` below.
    for key in [k for k in data if k in SHARED or k not in schema]:
        takers = [slot for slot in chosen if key in slot.fields]
        for slot in takers:
            _give(slot, key, data[key], report)
        if key in schema:
            if not takers and key in OF_ESTIMATORS:
                _without_effect(key, "adv_estimator", chosen, report)
            continue
        value = data.pop(key)
        if takers:
            algorithm[key] = value
        elif key in reads or key in included:
            free[key] = value
        elif key in (others := _others(registry)):
            _without_effect(key, others[key], chosen, report)
        else:
            report.error((key,), unknown_key(key, [*schema, *others, *_options(chosen)]))
    _keep_free(data, free, reads, report)
    data["algorithm"] = algorithm
    return free


def _give(slot: Slot, key: str, value: Any, report: Report) -> None:
    inside = (*slot.inside, key)
    if key in slot.options:
        report.error(
            inside, f"{slot.options[key]!r} here, and {value!r} at {dotted((key,))}. Fix: give {key} in one place"
        )
        return
    slot.options[key] = value
    # So that a later mistake is reported at the line where the key stands in the file.
    report.sources.moved[inside] = (key,)


def _others(registry: Registry) -> dict[str, str]:
    """Options of any installed implementation → the choice that would have to be another one."""
    found: dict[str, str] = {}
    for chooser in CHOOSERS:
        for entry in registry.entries(TOP_LEVEL[chooser]):
            try:
                options = entry.config_class()
            except PluginError:
                # Reported where it is named.
                continue
            if options is not None:
                found |= {a.name: chooser for a in attrs.fields(options) if a.init and a.name not in found}
    return found


def _without_effect(key: str, chooser: str, chosen: Sequence[Slot], report: Report) -> None:
    names = [slot.entry.name for slot in chosen if slot.path[0] == chooser]
    # The choice itself may be what is wrong, and then is reported.
    if names:
        report.warn((key,), f"{key} has no effect with {chooser} {names[0]!r}")


def _options(chosen: Sequence[Slot]) -> list[str]:
    return [name for slot in chosen for name in slot.fields]


def _keep_free(data: dict[str, Any], free: Mapping[str, Any], reads: set[str], report: Report) -> None:
    read = [key for key in free if key in reads]
    if read:
        report.note(
            (read[0],), f"free values, which only ${{…}} reads and which may also stand under vars: {', '.join(read)}"
        )
    if free and isinstance(data.get("vars", {}), dict):
        # What `vars` says wins: a free key is only another way to write it.
        data["vars"] = {**free, **data.get("vars", {})}


assert all(chooser in TOP_LEVEL for chooser in CHOOSERS)
