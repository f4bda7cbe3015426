"""Requests over several engines: a trajectory stays where its prefix is cached, a new one goes where least is
waiting."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from turnwise.contracts.inference import Request

REMEMBERED = 100_000
"""Trajectories whose engine is remembered; the oldest are forgotten."""


class Affinity:
    """The engine of each trajectory, by number, and how many requests each engine has now."""

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._loads: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        """Requests that are under way now."""
        return self._loads.total()

    @contextmanager
    def of(self, request: Request, serving: Collection[int]) -> Iterator[int]:
        """The engine among `serving` (not empty) that the request goes to; it counts as that engine's load meanwhile.

        A request without an `order` belongs to no trajectory and goes where least is waiting, as do those whose engine
        serves no more."""
        # The last number of an order is the turn's: what stands before it is common to a trajectory's requests.
        trajectory = request.order[:-1]
        home = self._homes.get(trajectory)
        if home is None or home not in serving:
            # Of equal loads the lowest number, so that equal runs choose alike.
            home = min(serving, key=lambda number: (self._loads[number], number))
        if trajectory:
            self._homes[trajectory] = home
            self._homes.move_to_end(trajectory)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        self._loads[home] += 1
        try:
            yield home
        finally:
            self._loads[home] -= 1
