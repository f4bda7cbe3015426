"""Walk along a number line to the goal: an environment and its hook, a whole plugin in one file."""

from __future__ import annotations

import random
from typing import Any

import turnwise

Step = tuple[str, float, bool, bool, dict[str, Any]]


class NumberLine:
    """The goal lies up to `longest` steps to the left or to the right. Reaching it gives 1, a word that is no direction
    −0.1."""

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest
        self._distance = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the goal from the seed; a positive distance is to the right."""
        draw = random.Random(seed)
        self._distance = draw.randint(1, self._longest) * draw.choice((-1, 1))
        return self._observation(), self._info()

    def step(self, action: str) -> Step:
        """Take the step that the model's word names."""
        valid = action in ("left", "right")
        if valid:
            self._distance += 1 if action == "left" else -1
        reached = self._distance == 0
        return (
            self._observation(),
            float(reached) if valid else -0.1,
            reached,
            False,
            self._info() | {"success": reached},
        )

    def render(self) -> str:
        """The line as a picture of text."""
        middle = 2 * self._longest
        return "".join(
            "@" if x == middle else "G" if x == middle + self._distance else "." for x in range(2 * middle + 1)
        )

    def _observation(self) -> str:
        return f"The goal is {abs(self._distance)} to the {'right' if self._distance > 0 else 'left'}."

    def _info(self) -> dict[str, Any]:
        return {"state_key": self._distance, "actions": ("left", "right")}


@turnwise.hookimpl
def environments() -> list[turnwise.Implementation]:
    """What this plugin provides."""
    return [turnwise.Implementation("number_line", NumberLine, summary="walk along a number line to the goal")]
