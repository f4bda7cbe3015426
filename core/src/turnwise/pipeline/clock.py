"""Where the seconds of a step go: one clock for all rooms of the pipeline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Seconds by phase (`rollout`, `actor_train`, …) since the last `take`; a phase may come more than once, or within
    another. `now`: what tells the time; a run takes that of its event loop, which a test may let stand still."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._taken = now()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done meanwhile counts for `name`, a failure included."""
        began = self._now()
        try:
            yield
        finally:
            # Added, for a step may wait for the sampler twice: for its batch, and before its weights are published.
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def seconds(self, name: str) -> float:
        """Of one phase so far, 0 if it was not."""
        return self._seconds.get(name, 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the last `take`, whatever they were spent with."""
        return self._now() - self._taken

    def take(self) -> dict[str, float]:
        """All phases, and begin anew."""
        taken, self._seconds = self._seconds, {}
        self._taken = self._now()
        return taken
