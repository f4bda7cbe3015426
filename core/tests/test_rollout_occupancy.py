"""One sum of live episodes for all that play on a backend."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from attrs import define

from turnwise.rollout.occupancy import Occupancy


@define  # attrs makes it unhashable
class Backend:
    told: list[int]

    def live(self, episodes: int) -> None:
        self.told.append(episodes)


def of(backend: Any) -> Occupancy:
    return Occupancy(backend)


def test_every_change_of_the_sum_is_reported_once_and_the_first_in_any_case() -> None:
    backend = Backend([])
    training, evaluation = of(backend), of(backend)
    training.set(0)
    training.set(4)
    training.set(4)
    evaluation.set(3)
    training.set(0)
    evaluation.set(0)
    assert backend.told == [0, 4, 7, 3, 0]


def test_backends_that_are_equal_are_counted_apart() -> None:
    one, other = Backend([]), Backend([])
    first, second = of(one), of(other)
    first.set(2)
    second.set(5)
    assert (one.told, other.told) == ([2], [5])


def test_a_backend_that_nobody_plays_on_is_let_go() -> None:
    backend = Backend([])
    gone = weakref.ref(backend)
    share = of(backend)
    share.set(1)
    del share, backend
    gc.collect()
    assert gone() is None
