"""MiniGrid's observations as text: by their encoding, without the package."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from turnwise.errors import ConfigError
from turnwise_gymnasium.bridge import GymnasiumBridge
from turnwise_gymnasium.grids import is_grid, map_text
from turnwise_gymnasium.observations import text_of

EMPTY, WALL, DOOR, KEY, GOAL, AGENT = 1, 2, 4, 5, 8, 10


def view(carried: bool = False) -> np.ndarray:
    """Three columns, three rows: a wall, then key and goal, then a locked door left of the agent."""
    cells = np.zeros((3, 3, 3), np.uint8)
    cells[:, 0] = (WALL, 5, 0)
    cells[0, 1], cells[1, 1], cells[2, 1] = (0, 0, 0), (KEY, 4, 0), (GOAL, 1, 0)
    cells[0, 2], cells[1, 2], cells[2, 2] = (DOOR, 4, 2), (KEY, 0, 0) if carried else (EMPTY, 0, 0), (EMPTY, 0, 0)
    return cells


def observed(image: np.ndarray, direction: int = 3) -> dict[str, Any]:
    return {"image": image, "direction": np.int64(direction), "mission": "open the door"}


class Grid(gymnasium.Env[Any, Any]):
    """A MiniGrid of one view."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (3, 3, 3), np.uint8),
                "direction": spaces.Discrete(4),
                "mission": spaces.Text(50),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return observed(view()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return observed(view(carried=True), 0), 1.0, True, False, {}


@pytest.fixture(autouse=True, scope="module")
def grid() -> Any:
    gymnasium.register("TurnwiseGrid-v0", entry_point=Grid)
    yield
    del gymnasium.registry["TurnwiseGrid-v0"]


def test_a_grid_is_shown_with_mission_facing_map_and_what_is_in_view() -> None:
    env = GymnasiumBridge("TurnwiseGrid-v0", action_names=["left", "forward"])
    lines = env.reset(seed=0)[0].splitlines()
    assert lines[:2] == ["Mission: open the door", "Facing: up"]
    assert lines[2].startswith("View (you are ^ and look up;")
    assert lines[3:6] == ["# # #", "? K G", "D ^ ."]
    assert lines[6:] == [
        "In view: yellow key 1 ahead; goal 1 ahead 1 right; locked yellow door 1 left",
        "Actions: left, forward",
    ]
    after = env.step("forward")[0].splitlines()
    assert (after[1], after[-2]) == ("Facing: right", "Carrying: red key")
    assert isinstance(env.render(), str)


def test_fields_are_placeholders_of_the_template() -> None:
    env = GymnasiumBridge("TurnwiseGrid-v0", template="{mission} ({direction})\n{image}")
    assert env.reset(seed=0)[0].startswith("open the door (up)\nView (you are ^")
    with pytest.raises(
        ConfigError, match=r"placeholder \{task\}.*\{actions\}, \{direction\}, \{image\}, \{mission\} are known"
    ):
        GymnasiumBridge("TurnwiseGrid-v0", template="{task}")


def test_a_full_map_has_the_agent_in_it() -> None:
    cells = view()
    cells[2, 2] = (AGENT, 0, 2)
    lines = map_text(cells).splitlines()
    assert lines[0].startswith("Map (you are < at column 3, row 3;")
    assert lines[1:4] == ["# # #", "? K G", "D . <"]
    assert (
        lines[4]
        == "In view: yellow key at column 2, row 2; goal at column 3, row 2; locked yellow door at column 1, row 3"
    )


@pytest.mark.parametrize("image", [np.full((3, 3, 3), 100, np.uint8), np.zeros((3, 3), np.uint8), "image"])
def test_what_no_cell_holds_is_no_grid(image: Any) -> None:
    assert not is_grid(observed(image))
    assert text_of({"mission": "go", "place": 1}) == "mission: go\nplace: 1"
