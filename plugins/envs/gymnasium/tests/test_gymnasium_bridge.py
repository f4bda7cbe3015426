"""The bridge: any Gymnasium environment of discrete actions as text."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.environment import Environment, check_reset, check_step
from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_gymnasium.bridge import GymnasiumBridge
from turnwise_gymnasium.fixtures import bridge_fixture
from turnwise_gymnasium.observations import is_discrete, key_of, text_of


class Corridor(gymnasium.Env[Any, Any]):
    """Positions 0…3; actions 5 (back) and 6 (on); +1 at the end; the observation is what `space` asks for."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, space: str = "tuple", render_mode: str | None = None) -> None:
        self.action_space = spaces.Discrete(2, start=5)
        self.observation_space = {
            "tuple": spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2))),
            "dict": spaces.Dict({"place": spaces.Discrete(4), "wind": spaces.Box(-1, 1, (2,), np.float32)}),
            "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        }[space]
        self.space, self.render_mode, self.at = space, render_mode, 0

    def _observe(self) -> Any:
        if self.space == "tuple":
            return self.at, np.array([1, 0], np.int8)
        if self.space == "dict":
            return {"place": np.int64(self.at), "wind": np.array([0.12345, -0.0], np.float32)}
        return np.full((4, 5, 3), self.at, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = max(self.at + (1 if action == 6 else -1), 0)
        return self._observe(), float(self.at == 3), self.at == 3, False, {}

    def render(self) -> Any:
        return np.zeros((2, 2, 3), np.uint8)


@pytest.fixture(autouse=True, scope="module")
def corridor() -> Any:
    gymnasium.register("TurnwiseCorridor-v0", entry_point=Corridor)
    yield
    del gymnasium.registry["TurnwiseCorridor-v0"]


def play(env: GymnasiumBridge, actions: list[str], seed: int = 0) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


def test_cart_pole_is_played_as_gymnasium_plays_it() -> None:
    env, peer = (
        GymnasiumBridge("CartPole-v1", action_names=["Left", "Right"], template="{observation} | {actions}"),
        gymnasium.make("CartPole-v1"),
    )
    observation, info = env.reset(seed=3)
    numbers, _ = peer.reset(seed=3)
    assert observation == ", ".join(f"{float(x) + 0.0:.4g}" for x in numbers) + " | Left, Right"
    assert "state_key" not in info
    for action in (0, 1, 1, 0, *[1] * 30):
        numbers, gained, over, _, _ = peer.step(action)
        observation, reward, terminated, truncated, info = env.step(("left", " RIGHT ")[action])
        assert observation.startswith(", ".join(f"{float(x) + 0.0:.4g}" for x in numbers))
        assert (reward, terminated, truncated) == (gained, over, False)
        if over:
            break
    assert over
    assert env.step("left")[1:4] == (0.0, True, False)


def test_frozen_lake_of_gymnasium_has_a_state_key_and_success() -> None:
    env = GymnasiumBridge(
        "FrozenLake-v1",
        action_names=["Left", "Down", "Right", "Up"],
        env_kwargs={"is_slippery": False},
        success_reward=1.0,
    )
    answers = play(env, ["Down", "Down", "Right", "Right", "Down", "Right"])
    assert answers[0][1] == {"actions": ["Left", "Down", "Right", "Up"], "state_key": 0, "success": False}
    assert [answer[4]["state_key"] for answer in answers[1:]] == [4, 8, 9, 10, 14, 15]
    assert [answer[4]["success"] for answer in answers[1:]] == [False] * 5 + [True]
    assert answers[-1][0] == "15\nActions: Left, Down, Right, Up"


def test_an_end_below_the_threshold_is_no_success() -> None:
    env = GymnasiumBridge(
        "FrozenLake-v1",
        action_names=["Left", "Down", "Right", "Up"],
        env_kwargs={"is_slippery": False},
        success_reward=1.0,
    )
    hole = play(env, ["Down", "Right"])[-1]
    assert (hole[2], hole[4]["success"]) == (True, False)


def test_names_default_to_the_numbers_of_the_space_and_a_shifted_start_is_kept() -> None:
    env = GymnasiumBridge("TurnwiseCorridor-v0")
    answers = play(env, ["6", "6", "5", "0", "6", "6"])
    assert answers[0][1]["actions"] == ["5", "6"]
    assert [answer[4]["state_key"] for answer in answers[1:]] == [(place, (2, 1, 0)) for place in (1, 2, 1, 1, 2, 3)]
    assert [answer[1] for answer in answers[1:]] == [0, 0, 0, -0.1, 0, 1]
    assert [answer[4]["metrics"]["invalid"] for answer in answers[1:]] == [0, 0, 0, 1, 0, 0]
    assert answers[1][0] == "1, (1, 0)\nActions: 5, 6"


def test_dictionaries_are_readable() -> None:
    assert (
        GymnasiumBridge("TurnwiseCorridor-v0", "{observation}", env_kwargs={"space": "dict"}).reset(seed=0)[0]
        == "place: 0\nwind: (0.1235, 0)"
    )


def test_pictures_become_image_parts() -> None:
    env = GymnasiumBridge(
        "TurnwiseCorridor-v0", "You see {observation} Choose from {actions}.", env_kwargs={"space": "image"}
    )
    parts, _ = check_reset(env.reset(seed=0), "bridge")
    assert [part["type"] for part in parts] == ["text", "image", "text"]
    assert parts[2]["text"] == " Choose from 5, 6."
    env.step("6")
    assert int(parts[1]["image"].max()) == 0  # an earlier observation stays as it was
    assert env.render().shape == (4, 5, 3)


def test_render_asks_the_environment_where_it_has_a_mode() -> None:
    pictured = GymnasiumBridge("TurnwiseCorridor-v0", env_kwargs={"render_mode": "rgb_array"})
    pictured.reset(seed=0)
    assert pictured.render().shape == (2, 2, 3)
    text = GymnasiumBridge("TurnwiseCorridor-v0")
    text.reset(seed=0)
    assert text.render() == "0, (1, 0)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(7), "7"),
        (np.array(2.5), "2.5"),
        (1234.5678, "1235"),
        (-0.0, "0"),
        (np.array([1, 2]), "1, 2"),
        (np.array([[1, 2], [3, 4]]), "1, 2\n3, 4"),
        (("a", np.array([0.5]), (1, 2)), "a, (0.5), (1, 2)"),
        ({"a": {"b": 1}, "c": True}, "a: (b: 1)\nc: True"),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    assert text_of(value) == text


def test_keys_of_discrete_values() -> None:
    nested = spaces.Dict(
        {"b": spaces.Discrete(3), "a": spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.Discrete(2)))}
    )
    assert is_discrete(nested)
    assert not is_discrete(spaces.Dict({"a": nested, "b": spaces.Box(0, 1)}))
    one, other = ({"b": b, "a": (np.array([1, 0]), 1)} for b in (0, 2))
    assert key_of(one) == (("a", ((2, 1, 0), 1)), ("b", 0))
    assert hash(key_of(one)) != hash(key_of(other))


@settings(max_examples=30)
@given(st.integers(0, 2**63), st.lists(st.one_of(st.sampled_from(["0", "1"]), st.text(max_size=6)), max_size=15))
def test_any_text_is_answered_the_same_way_twice(seed: int, actions: list[str]) -> None:
    env = GymnasiumBridge("Blackjack-v1")
    first = play(env, actions, seed)
    assert all(math.isfinite(check_step(answer, "bridge")[1]) for answer in first[1:])
    assert play(GymnasiumBridge("Blackjack-v1"), actions, seed) == first


def test_it_pickles_keeps_the_contract_and_leaves_global_random_state_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    env = GymnasiumBridge(**bridge_fixture()["env_config"])
    assert isinstance(env, Environment)
    play(env, ["Left", "Right"])
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("Left") == env.step("Left")
    for one in (env, copy):
        one.close()
        one.close()
    assert (random.random(), np.random.random()) == expected


@pytest.mark.parametrize("call", [lambda env: env.step("0"), lambda env: env.render()])
def test_before_reset_there_is_a_clear_error(call: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="before reset"):
        call(GymnasiumBridge("CartPole-v1"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"env_id": "Pendulum-v1"}, "plays Discrete actions only"),
        ({"env_id": "CartPool-v1"}, "CartPole"),
        ({"env_id": "no_such_module_of_mine:Thing-v0"}, "no_such_module_of_mine"),
        ({"env_id": "CartPole-v1", "env_kwargs": {"colour": 1}}, "colour"),
        ({"env_id": "CartPole-v1", "action_names": ["Left"]}, "has 1 names"),
        ({"env_id": "CartPole-v1", "action_names": ["Left", "left "]}, "not all different"),
        ({"env_id": "CartPole-v1", "action_names": ["On", False]}, "quote it"),
        ({"env_id": "CartPole-v1", "template": "{observations}"}, "{observations}"),
        ({"env_id": 3}, "env_id is 3"),
        ({"env_id": "CartPole-v1", "template": None}, "template is None"),
        ({"env_id": "CartPole-v1", "env_kwargs": "fast"}, "env_kwargs is 'fast'"),
        ({"env_id": "CartPole-v1", "action_names": "LR"}, "action_names is 'LR'"),
        ({"env_id": "CartPole-v1", "invalid_penalty": 1}, "at most 0"),
        ({"env_id": "CartPole-v1", "success_reward": math.nan}, "finite"),
    ],
)
def test_options_that_cannot_be_used_are_reported_in_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match="the Gymnasium environment") as caught:
        GymnasiumBridge(**options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"action_names": ["back"]}, {"action_names": ["on", "ON"]}, {"template": "{wind}"}]
)
def test_a_bridge_that_cannot_be_made_leaves_no_environment_open(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Corridor] = []

    def close(self: Corridor) -> None:
        closed.append(self)

    monkeypatch.setattr(Corridor, "close", close)
    with pytest.raises(ConfigError):
        GymnasiumBridge("TurnwiseCorridor-v0", **options)
    assert len(closed) == 1


def test_hooks_are_lazy_and_name_what_they_need() -> None:
    import turnwise_gymnasium

    records = {
        record.name: record for record in (*turnwise_gymnasium.environments(), *turnwise_gymnasium.inference_backends())
    }
    assert set(records) == {"frozen_lake", "gymnasium", "frozen_lake_walker"}
    assert all(isinstance(record.target, str) for record in records.values())
    assert records["gymnasium"].requires == ("gymnasium",)
