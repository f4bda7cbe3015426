"""How many episodes may ask a backend: one sum over all schedulers that play on it."""

from __future__ import annotations

from weakref import WeakValueDictionary

from attrs import define

from turnwise.contracts.inference import InferenceBackend
from turnwise.errors import EngineError, boundary


@define(eq=False)
class _Sum:
    """The episodes alive on one backend, and the number that it knows (none yet: -1)."""

    backend: InferenceBackend
    episodes: int = 0
    reported: int = -1


# By identity, for a backend need not be hashable. Every occupancy holds its sum and the sum its backend, so that no
# identity is used again while it stands here.
_sums: WeakValueDictionary[int, _Sum] = WeakValueDictionary()


class Occupancy:
    """One scheduler's part of the episodes that are alive on a backend.

    A batching backend starts when as many requests wait as `live` reported. Training and evaluation each have a
    scheduler on the same
    backend: were each to report its own number, the backend would wait for requests that never come, or start before
    all have come.
    """

    def __init__(self, backend: InferenceBackend) -> None:
        self._sum = _sums.setdefault(id(backend), _Sum(backend))
        self._episodes = 0

    def set(self, episodes: int) -> None:
        """So many of this scheduler's episodes are alive now; the backend gets the sum where it has changed, and the
        first."""
        self._sum.episodes += episodes - self._episodes
        self._episodes = episodes
        if self._sum.episodes != self._sum.reported:
            self._sum.reported = self._sum.episodes
            with boundary("actor_infer: live", EngineError):
                self._sum.backend.live(self._sum.episodes)
