"""On which devices each role of a run lives. Placement, colocation, transport and preflight all ask here: none of them
knows more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from turnwise.contracts.runtime import RuntimeCapabilities

Devices = tuple[int, ...]


def effective(
    named: Mapping[str, Devices], runtime: RuntimeCapabilities, visible: int, *, attached: bool = False
) -> dict[str, Devices]:
    """The devices of every role in `named`, which holds their `device_mapping`: the numbers that are written, else
    those that the runtime gives.

    `visible`: GPUs of this machine; `attached`: the sampler uses an engine that runs already, and no device here. A
    role without numbers gets devices that no role names; where none are left the sampler takes turns with the actor.
    Second training roles are where the actor is.
    """
    given = _given(named, runtime, visible)
    if not given:
        return dict(named)
    # One iterator for all roles: a number that one has taken is gone for the next.
    free = _free(named, runtime, visible)
    actor = named["actor_train"] or _next(free, given) or tuple(range(given))
    found = {name: numbers or actor for name, numbers in named.items()}
    # The actor first: where devices are few it is the sampler that takes turns.
    if "actor_infer" in named and not named["actor_infer"]:
        found["actor_infer"] = () if attached else _next(free, given) or actor[:given]
    return found


def _given(named: Mapping[str, Devices], runtime: RuntimeCapabilities, visible: int) -> int:
    """How many devices a role gets that names none; 0: the CPU, or what only the runtime will find."""
    # The numbers are processes, and a role without one gets a process of its own.
    if not runtime.gpus:
        return 0
    if runtime.one_process:
        return min(1, visible)
    # A role that names GPUs of a cluster elsewhere cannot be placed without any, so there are some.
    some = not runtime.counts_devices and any(named.values())
    return max(runtime.least_devices, int(some))


def _free(named: Mapping[str, Devices], runtime: RuntimeCapabilities, visible: int) -> Iterator[int]:
    """The numbers that no role names, in order; of a cluster elsewhere nobody knows the last."""
    taken = {number for numbers in named.values() for number in numbers}
    numbers = range(visible) if runtime.one_process or runtime.counts_devices else itertools.count()
    return (number for number in numbers if number not in taken)


def _next(free: Iterator[int], given: int) -> Devices:
    """The next of them, all that are wanted or none."""
    numbers = tuple(itertools.islice(free, given))
    return numbers if len(numbers) == given else ()
