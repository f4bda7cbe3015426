"""The engines behind one backend on Ray, and which devices each has."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from turnwise.contracts.inference import BackendCapabilities
from turnwise.contracts.runtime import ServePlan
from turnwise.declared import declared
from turnwise.errors import ConfigError
from turnwise_ray.actors import Actor
from turnwise_ray.cluster import Seat


@define(eq=False)
class Member:
    """One engine: its seats, its actor (None while it is being replaced), whether its end is known though its watcher
    has not seen it yet, its node, and as how many readers of an offer it counts, by transport."""

    number: int
    seats: list[Seat]
    actor: Actor = None
    lost: bool = False
    node: str = ""
    readers: Mapping[str, int] = field(factory=dict)
    restarts: int = 0


def parts(plan: ServePlan, seats: list[Seat]) -> list[list[Seat]]:
    """The seats of each engine. Raises ConfigError where the devices cannot be divided so."""
    # Without devices (a player, a model on the CPU) the seats are one engine's.
    if not plan.devices:
        return [seats]
    known = declared(BackendCapabilities, plan.implementation, plan.config)
    size = known.data_parallel_size
    try:
        engines = int(size(len(seats))) if size is not None else len(seats)
    except ValueError as error:
        raise ConfigError(
            f"{plan.role}.device_mapping: {error}. Fix: correct the devices, or the sizes in strategy_config"
        ) from error
    # A server may hold several copies of the model, and is one engine all the same.
    each = known.devices_per_engine or len(seats) // engines
    return [seats[begin : begin + each] for begin in range(0, len(seats), each)]
