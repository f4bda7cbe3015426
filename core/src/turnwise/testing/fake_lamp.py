"""A fake environment that has to be seen: whoever does not look is right half of the time."""

from __future__ import annotations

from typing import Any

import numpy as np

SIDES = ("Left", "Right")


class FakeLamp:
    """A picture of uint8 [height, width, 3], one half of it lit: going there is worth 1, for `turns` turns; a hundredth
    for every letter said beside it makes unequal rewards likely."""

    def __init__(self, height: int = 50, width: int = 70, turns: int = 2) -> None:
        self._height, self._width, self._turns = height, width, turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Light the side that the seed draws."""
        self._random, self._turn = np.random.default_rng(seed), 0
        return self._shown(), {"actions": SIDES}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Reward the side that was lit, and light one again."""
        self._turn += 1
        right = action.strip() == self._side
        return (
            self._shown(),
            float(right) + len(action) / 100,
            self._turn == self._turns,
            False,
            {"actions": SIDES, "success": right},
        )

    def _shown(self) -> list[dict[str, Any]]:
        self._side = str(self._random.choice(SIDES))
        picture = np.zeros((self._height, self._width, 3), np.uint8)
        half = self._width // 2
        picture[:, slice(half) if self._side == "Left" else slice(half, None)] = 255
        return [{"type": "image", "image": picture}, {"type": "text", "text": "Where is the light?"}]

    def close(self) -> None:
        """Nothing to release."""
