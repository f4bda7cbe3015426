"""Sokoban as text: push every box onto a target. The rewards of gym-sokoban, several moves a turn if allowed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.errors import EnvironmentFailure
from turnwise_sokoban import options as check
from turnwise_sokoban.drawing import draw_room
from turnwise_sokoban.rooms import SPLITS, Room, codes, make_room

# The order of Room.steps.
ACTIONS = ("Up", "Down", "Left", "Right")
# gym-sokoban's.
ON_TARGET, OFF_TARGET, SOLVED = 1.0, -1.0, 10.0
_INDEX = {name.lower(): i for i, name in enumerate(ACTIONS)}


class Sokoban:
    """The environment `sokoban`; its options are described in the README.

    Every move gives `step_penalty`, +1 for a box pushed onto a target, −1 for one pushed off, +10 when all are on
    targets; an invalid text gives `step_penalty + invalid_penalty`. Raises ConfigError for options that cannot be used.
    """

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 100,
        grid_lookup: Mapping[int | str, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        max_steps: int | None = None,
        invalid_penalty: float = -0.1,
        step_penalty: float = -0.1,
        max_actions_per_turn: int = 1,
        action_separator: str = "||",
        describe: bool = False,
        split: str = "all",
    ) -> None:
        self._height, self._width = check.dimensions(dim_room)
        self._num_boxes = check.integer("num_boxes", num_boxes, 1)
        self._search_depth = check.integer("search_depth", search_depth, 1)
        self._symbols = check.symbols(grid_lookup)
        self._vocabulary = check.vocabulary(grid_vocab, self._symbols)
        self._max_steps = None if max_steps is None else check.integer("max_steps", max_steps, 1)
        self._invalid_penalty = check.penalty("invalid_penalty", invalid_penalty)
        self._step_penalty = check.penalty("step_penalty", step_penalty)
        self._max_actions = check.integer("max_actions_per_turn", max_actions_per_turn, 1)
        self._separator = check.separator(action_separator)
        self._describe = check.flag("describe", describe)
        self._split = check.choice("split", split, SPLITS)
        self._room: Room | None = None
        self._boxes: frozenset[int] = frozenset()
        self._player = self._steps = 0
        self._over = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start in the room of `seed`; without a seed, in a random one. `options` are not used."""
        seed = secrets.randbits(63) if seed is None else int(seed)
        self._room = make_room(seed, self._height, self._width, self._num_boxes, self._search_depth, self._split)
        self._boxes, self._player = self._room.boxes, self._room.player
        self._steps, self._over = 0, False
        observation, info = self._view(self._room)
        info["env_instruction"] = self.instruction
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the moves of one turn: their names in any case, white space around them ignored, `action_separator`
        between them.

        The turn ends at a text that is no move or at a move past `max_actions_per_turn` (both invalid: counted once, a
        step of `max_steps`, `invalid_penalty`), when the room is solved, and at `max_steps`; what was played before
        stands. Raises EnvironmentFailure before the first reset. After the end every step returns the final observation
        with reward 0.
        """
        room = self._room
        if room is None:
            raise EnvironmentFailure("sokoban.step was called before reset. Fix: call reset first.")
        before = (self._boxes, self._player)
        reward, invalid = 0.0, False
        for i, name in enumerate(action.split(self._separator)):
            if self._over or invalid:
                break
            # A move past the limit is as invalid as a text that is no move.
            direction = _INDEX.get(name.strip().lower()) if i < self._max_actions else None
            invalid = direction is None
            self._steps += 1
            reward += self._step_penalty + (self._invalid_penalty if direction is None else self._move(room, direction))
            self._over = self._boxes == room.targets or (self._max_steps is not None and self._steps >= self._max_steps)
        # A move that solves the room at max_steps has ended the episode: it was not cut.
        terminated = self._boxes == room.targets
        observation, info = self._view(room)
        info["metrics"] = {"invalid": float(invalid), "effective": float(before != (self._boxes, self._player))}
        return observation, reward, terminated, self._over and not terminated, info

    def _move(self, room: Room, direction: int) -> float:
        """Walk or push one cell if nothing is in the way; the reward of what happened to the boxes."""
        step = room.steps[direction]
        cell, beyond = self._player + step, self._player + 2 * step
        if room.walls[cell]:
            return 0.0
        if cell not in self._boxes:
            self._player = cell
            return 0.0
        if room.walls[beyond] or beyond in self._boxes:
            return 0.0
        # Frozen sets: the room's own start is shared by all members through the cache, and must not change.
        self._boxes, self._player = self._boxes - {cell} | {beyond}, cell
        reward = ON_TARGET * (beyond in room.targets) + OFF_TARGET * (cell in room.targets)
        return reward + SOLVED * (self._boxes == room.targets)

    @property
    def instruction(self) -> str:
        """The rules, the meaning of the symbols and the actions, for a system prompt."""
        several = (
            f" You may give up to {self._max_actions} actions, separated by {self._separator}."
            if self._max_actions > 1
            else ""
        )
        return (
            "You play Sokoban. Push every box onto a target; boxes cannot be pulled."
            f" {', '.join(f'{symbol}: {word}' for symbol, word in self._vocabulary.items())}. Your actions:"
            f" {', '.join(ACTIONS)}.{several}"
        )

    def _view(self, room: Room) -> tuple[str, dict[str, Any]]:
        """What the player sees, and the part of `info` that every call gives."""
        shown = codes(room, self._boxes, self._player)
        symbols = [self._symbols[code] for code in shown]
        observation = "\n".join([" ".join(symbols[i : i + room.width]) for i in range(0, len(symbols), room.width)])
        if self._describe:
            observation += f"\n{self._words(room)}"
        # With the width, because rooms of other shapes may hold the same cells.
        info = {
            "state_key": (room.width, bytes(shown).hex()),
            "success": self._boxes == room.targets,
            "actions": list(ACTIONS),
        }
        return observation, info

    def _words(self, room: Room) -> str:
        boxes = [self._where(room, cell) + " (on a target)" * (cell in room.targets) for cell in sorted(self._boxes)]
        targets = [self._where(room, cell) for cell in sorted(room.targets - self._boxes)]
        walls = [name for name, step in zip(ACTIONS, room.steps) if room.walls[self._player + step]]
        return (
            f"Boxes: {', '.join(boxes)}.\nFree targets: {', '.join(targets) or 'none'}.\nWalls:"
            f" {' '.join(walls) or 'none'}."
        )

    def _where(self, room: Room, cell: int) -> str:
        """Where a cell lies from the player, as `2 down 1 right`; `here` for its own."""
        (row, column), (own_row, own_column) = divmod(cell, room.width), divmod(self._player, room.width)
        down, right = row - own_row, column - own_column
        vertical = f"{abs(down)} {'down' if down > 0 else 'up'}" if down else ""
        horizontal = f"{abs(right)} {'right' if right > 0 else 'left'}" if right else ""
        return " ".join(part for part in (vertical, horizontal) if part) or "here"

    def render(self) -> np.ndarray:
        """The room as a uint8 picture [32·height, 32·width, 3]. Raises EnvironmentFailure before the first reset."""
        if self._room is None:
            raise EnvironmentFailure("sokoban.render was called before reset. Fix: call reset first.")
        return draw_room(codes(self._room, self._boxes, self._player), self._room.width)

    def close(self) -> None:
        """Nothing is held; may be called twice."""
