"""FrozenLake as text: the dynamics of Gymnasium's FrozenLakeEnv, on random solvable maps that are held out by
content."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, EnvironmentFailure, did_you_mean
from turnwise_gymnasium.drawing import draw_lake
from turnwise_gymnasium.levels import SPLITS, Level, make_level, moves

# Gymnasium's order.
ACTIONS = ("Left", "Down", "Right", "Up")
OBSERVATIONS = ("grid", "relative", "both")
INSTRUCTION = (
    "You walk on a frozen lake. Reach the goal and do not fall into a hole. "
    "P: you, _: ice, O: hole, G: goal, X: you in a hole, √: you on the goal. Your actions: Left, Down, Right, Up."
)
_INDEX = {name.lower(): i for i, name in enumerate(ACTIONS)}
_SYMBOLS = str.maketrans("SFHG", "__OG")
_HERE = {"S": "P", "F": "P", "H": "X", "G": "√"}
# Gymnasium's rate of slipping to either side.
_SIDEWAYS = (1.0 - 1.0 / 3.0) / 2.0
# Summed up as Gymnasium does, so that a draw beside a bound falls to the same side.
_FIRST, _SECOND, _THIRD = (float(x) for x in np.cumsum([_SIDEWAYS, 1.0 / 3.0, _SIDEWAYS]))


class FrozenLake:
    """The environment `frozen_lake`; its options are described in the README.

    Every step gives `step_penalty`, plus `goal_reward` on the goal, `hole_penalty` in a hole, or `invalid_penalty` for
    a text that is no action. Same seed and actions give the same episode, slips included. Raises ConfigError for
    options that cannot be used.
    """

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        map_seed: int | None = None,
        random_start_goal: bool = False,
        goal_reward: float = 1.0,
        hole_penalty: float = 0.0,
        invalid_penalty: float = -0.1,
        step_penalty: float = 0.0,
        max_steps: int | None = None,
        observation: str = "grid",
        split: str = "all",
    ) -> None:
        self._size = _integer("size", size, 2)
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1:
            raise ConfigError(
                f"p is {p!r}, frozen_lake. Fix: the probability that a cell is ice, above 0 and at most 1."
            )
        self._p = float(p)
        self._slippery = _flag("is_slippery", is_slippery)
        self._map_seed = None if map_seed is None else _integer("map_seed", map_seed, 0)
        self._random_start_goal = _flag("random_start_goal", random_start_goal)
        self._goal_reward = _number("goal_reward", goal_reward)
        self._hole_penalty = _penalty("hole_penalty", hole_penalty)
        self._invalid_penalty = _penalty("invalid_penalty", invalid_penalty)
        self._step_penalty = _penalty("step_penalty", step_penalty)
        self._max_steps = None if max_steps is None else _integer("max_steps", max_steps, 1)
        self._observation = _choice("observation", observation, OBSERVATIONS)
        self._split = _choice("split", split, SPLITS)
        self._level: Level | None = None
        self._rng: np.random.Generator | None = None
        self._at = self._steps = 0
        self._over = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start on the map of `seed` (of `map_seed` where one is set); without a seed, on a random one. `options` are
        not used."""
        seed = secrets.randbits(63) if seed is None else int(seed)
        map_seed = seed if self._map_seed is None else self._map_seed
        self._level = make_level(map_seed, self._size, self._p, self._random_start_goal, self._split)
        if self._slippery:
            self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
            # Gymnasium draws the start cell; the slips that follow are then the same.
            self._rng.random()
        self._at, self._steps, self._over = self._level.start, 0, False
        return self._observe(self._level), {**self._state(self._level), "env_instruction": INSTRUCTION}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Walk one cell: an action's name in any case, white space around it ignored. Any other text leaves the player
        where it is.

        Raises EnvironmentFailure before the first reset. After the end every step returns the final observation with
        reward 0.
        """
        level = self._level
        if level is None:
            raise EnvironmentFailure("frozen_lake.step was called before reset. Fix: call reset first.")
        direction = _INDEX.get(action.strip().lower())
        reward = 0.0
        if not self._over:
            self._steps += 1
            reward = self._step_penalty + (self._invalid_penalty if direction is None else self._walk(level, direction))
        # From where the player stands, not from this step: after the end every call must say the same again.
        here = level.cells[self._at]
        terminated = here in "GH"
        truncated = not terminated and self._max_steps is not None and self._steps >= self._max_steps
        self._over = terminated or truncated
        info = self._state(level)
        info["metrics"] = {"invalid": float(direction is None)}
        return self._observe(level), reward, terminated, truncated, info

    def _walk(self, level: Level, direction: int) -> float:
        if self._slippery:
            direction = self._slip(direction)
        self._at = moves(level.size)[self._at][direction]
        letter = level.cells[self._at]
        return self._goal_reward if letter == "G" else self._hole_penalty if letter == "H" else 0.0

    def _slip(self, direction: int) -> int:
        """The direction that the ice makes of it, by the same draw and the same sums as Gymnasium's categorical
        sampling."""
        assert self._rng is not None
        draw = self._rng.random()
        if _FIRST <= draw < _SECOND:
            return direction
        return (direction + 1) % 4 if _SECOND <= draw < _THIRD else (direction - 1) % 4

    def _state(self, level: Level) -> dict[str, Any]:
        # With the map: members of a group share it, but states of other maps must not be taken for the same.
        return {"state_key": (level.cells, self._at), "success": self._at == level.goal, "actions": list(ACTIONS)}

    def _observe(self, level: Level) -> str:
        if self._observation == "grid":
            return _grid(level, self._at)
        words = _words(level, self._at)
        return words if self._observation == "relative" else f"{_grid(level, self._at)}\n{words}"

    def render(self) -> np.ndarray:
        """The lake as a uint8 picture [32·size, 32·size, 3]. Raises EnvironmentFailure before the first reset."""
        if self._level is None:
            raise EnvironmentFailure("frozen_lake.render was called before reset. Fix: call reset first.")
        return draw_lake(self._level, self._at)

    def close(self) -> None:
        """Nothing is held; may be called twice."""


def _grid(level: Level, at: int) -> str:
    symbols = level.cells.translate(_SYMBOLS)
    symbols = symbols[:at] + _HERE[level.cells[at]] + symbols[at + 1 :]
    return "\n".join([" ".join(symbols[i : i + level.size]) for i in range(0, len(symbols), level.size)])


def _words(level: Level, at: int) -> str:
    if level.cells[at] in "GH":
        return "Done."
    (row, column), (goal_row, goal_column) = divmod(at, level.size), divmod(level.goal, level.size)
    down, right = goal_row - row, goal_column - column
    where = []
    if down:
        where.append(f"{down} down" if down > 0 else f"{-down} up")
    if right:
        where.append(f"{right} right" if right > 0 else f"{-right} left")
    holes = [name for name, cell in zip(ACTIONS, moves(level.size)[at]) if level.cells[cell] == "H"]
    return f"The goal is {' '.join(where)}.\nHoles: {' '.join(holes) or 'none'}."


def _integer(name: str, value: Any, least: int) -> int:
    # A bool is an int to Python, and YAML reads an unquoted `yes` as one.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, frozen_lake. Fix: an integer of at least {least}.")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, frozen_lake. Fix: true or false.")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}, frozen_lake. Fix: a finite number.")
    return float(value)


def _penalty(name: str, value: Any) -> float:
    number = _number(name, value)
    if number > 0:
        raise ConfigError(
            f"{name} is {value!r}, frozen_lake; it is added to the reward. Fix: a number of at most 0, as {-number}."
        )
    return number


def _choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(
            f"{name} is {value!r}, frozen_lake.{did_you_mean(str(value), known)} Fix: one of {', '.join(known)}."
        )
    return str(value)
