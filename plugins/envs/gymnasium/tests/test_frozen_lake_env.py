"""The environment `frozen_lake`: dynamics, texts, rewards, determinism."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.environment import Environment, check_reset, check_step
from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_gymnasium import frozen_lake as module
from turnwise_gymnasium.frozen_lake import ACTIONS, FrozenLake
from turnwise_gymnasium.levels import Level

HAND = Level("SFFF" + "FHFH" + "FFFH" + "HFFG", 4, 0, 15)
"""S F F F / F H F H / F F F H / H F F G."""


@pytest.fixture
def on_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_level", lambda *options: HAND)


def play(env: FrozenLake, actions: list[str], seed: int = 0) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


@pytest.mark.parametrize("is_slippery", [False, True])
@pytest.mark.parametrize("size", [4, 6])
def test_positions_rewards_and_ends_are_those_of_gymnasium(is_slippery: bool, size: int) -> None:
    chooser = np.random.default_rng(1)
    slipped = 0
    for seed in range(60):
        env = FrozenLake(size=size, is_slippery=is_slippery, random_start_goal=True)
        _, info = env.reset(seed=seed)
        cells = info["state_key"][0]
        peer = FrozenLakeEnv(desc=[cells[i : i + size] for i in range(0, size * size, size)], is_slippery=is_slippery)
        assert peer.reset(seed=seed)[0] == info["state_key"][1]
        for _ in range(30):
            action = int(chooser.integers(4))
            before = info["state_key"][1]
            _, reward, terminated, truncated, info = env.step(ACTIONS[action])
            cell, gained, over, _, _ = peer.step(action)
            assert (info["state_key"], reward, terminated, truncated) == ((cells, cell), float(gained), over, False)
            assert info["success"] == (gained == 1)
            slipped += cell != before and cell not in (before + np.array([-1, size, 1, -size])[action],)
            if terminated:
                break
    assert bool(slipped) == is_slippery


def test_grid_by_hand(on_hand: None) -> None:
    env = FrozenLake()
    texts = [answer[0] for answer in play(env, ["Down", "Right"])]
    assert texts[0] == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G"
    assert texts[1] == "_ _ _ _\nP O _ O\n_ _ _ O\nO _ _ G"
    assert texts[2] == "_ _ _ _\n_ X _ O\n_ _ _ O\nO _ _ G"
    goal = play(env, ["Down", "Down", "Right", "Right", "Down", "Right"])[-1]
    assert goal[0] == "_ _ _ _\n_ O _ O\n_ _ _ O\nO _ _ √"
    assert goal[1:4] == (1.0, True, False)
    assert goal[4]["success"] is True


def test_words_by_hand(on_hand: None) -> None:
    env = FrozenLake(observation="relative")
    texts = [answer[0] for answer in play(env, ["Down", "Down", "Right", "Right", "Down", "Right"])]
    assert texts == [
        "The goal is 3 down 3 right.\nHoles: none.",
        "The goal is 2 down 3 right.\nHoles: Right.",
        "The goal is 1 down 3 right.\nHoles: Down.",
        "The goal is 1 down 2 right.\nHoles: Up.",
        "The goal is 1 down 1 right.\nHoles: Right.",
        "The goal is 1 right.\nHoles: none.",
        "Done.",
    ]
    assert play(env, ["Right", "Right", "Down"])[-1][0] == "The goal is 2 down 1 right.\nHoles: Left Right."
    assert play(env, ["Down", "Right"])[-1][0] == "Done."


def test_words_upward_and_leftward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_level", lambda *options: Level("GFF" + "FFH" + "FFS", 3, 8, 0))
    assert FrozenLake(size=3, observation="relative").reset(seed=0)[0] == "The goal is 2 up 2 left.\nHoles: Up."


def test_both_is_the_grid_and_the_words(on_hand: None) -> None:
    assert (
        FrozenLake(observation="both").reset(seed=0)[0]
        == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G\nThe goal is 3 down 3 right.\nHoles: none."
    )


def test_rewards_by_hand(on_hand: None) -> None:
    env = FrozenLake(goal_reward=2, hole_penalty=-0.5, invalid_penalty=-0.25, step_penalty=-0.125)
    assert [answer[1] for answer in play(env, ["Down", "jump", "Right", "Left"])[1:]] == [-0.125, -0.375, -0.625, 0.0]
    assert [answer[1] for answer in play(env, ["Down", "Down", "Right", "Right", "Down", "Right"])[1:]][-1] == 1.875


def test_an_invalid_action_changes_nothing_but_the_reward_and_the_count(on_hand: None) -> None:
    env = FrozenLake()
    before, info_before = env.reset(seed=0)
    for text in ("", "down the hill", "2", "<answer>Down</answer>", "Downn", "√"):
        after, reward, terminated, truncated, info = env.step(text)
        assert (after, reward, terminated, truncated) == (before, -0.1, False, False)
        assert info["state_key"] == info_before["state_key"]
        assert info["metrics"] == {"invalid": 1.0}


@pytest.mark.parametrize("text", ["Down", "down", "DOWN", "  Down\n", "\tdOwN "])
def test_case_and_surrounding_white_space_do_not_matter(on_hand: None, text: str) -> None:
    env = FrozenLake()
    env.reset(seed=0)
    info = env.step(text)[4]
    assert (info["state_key"][1], info["metrics"]) == (4, {"invalid": 0.0})


def test_the_edge_holds_the_player_and_is_not_invalid(on_hand: None) -> None:
    _, reward, terminated, _, info = play(FrozenLake(), ["Left"])[-1]
    assert (info["state_key"][1], reward, terminated, info["metrics"]["invalid"]) == (0, 0.0, False, 0.0)


def test_max_steps_truncates_and_counts_invalid_actions(on_hand: None) -> None:
    answers = play(FrozenLake(max_steps=3), ["Left", "x", "Left", "Left"])
    assert [answer[2:4] for answer in answers[1:]] == [(False, False), (False, False), (False, True), (False, True)]
    ends = play(FrozenLake(max_steps=2), ["Down", "Right"])[-1]
    assert ends[2:4] == (True, False)  # a fall in the last step is an end of the environment's own


def test_info_at_reset_holds_the_state_the_actions_and_the_legend() -> None:
    _, info = check_reset(FrozenLake().reset(seed=3), "frozen_lake")
    hash(info["state_key"])
    assert info["actions"] == ["Left", "Down", "Right", "Up"]
    assert info["success"] is False
    assert all(symbol + ":" in info["env_instruction"] for symbol in "P_OGX√")


@pytest.mark.parametrize("observation", ["grid", "relative", "both"])
@pytest.mark.parametrize("is_slippery", [False, True])
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**63), actions=st.lists(st.one_of(st.sampled_from(ACTIONS), st.text(max_size=8)), max_size=20)
)
def test_any_text_is_answered_and_the_same_seed_and_actions_give_the_same_episode(
    observation: str, is_slippery: bool, seed: int, actions: list[str]
) -> None:
    env = FrozenLake(size=3, is_slippery=is_slippery, random_start_goal=True, observation=observation, max_steps=12)
    first = play(env, actions, seed)
    for answer in first[1:]:
        _, reward, terminated, truncated, _ = check_step(answer, "frozen_lake")
        assert math.isfinite(reward)
        assert not (terminated and truncated)
    assert play(env, actions, seed) == first
    assert (
        play(
            FrozenLake(size=3, is_slippery=is_slippery, random_start_goal=True, observation=observation, max_steps=12),
            actions,
            seed,
        )
        == first
    )


def test_global_random_state_is_untouched() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    for env in (FrozenLake(is_slippery=True, random_start_goal=True), FrozenLake()):
        play(env, ["Down", "Right", "x"], seed=123456)
        env.reset()
        env.render()
    assert (random.random(), np.random.random()) == expected


def test_two_instances_do_not_disturb_each_other() -> None:
    actions = ["Down", "Right", "Down", "Left", "Right"]
    alone = play(FrozenLake(is_slippery=True, random_start_goal=True), actions, 9)
    one, other = (
        FrozenLake(is_slippery=True, random_start_goal=True),
        FrozenLake(is_slippery=True, random_start_goal=True),
    )
    mixed: list[Any] = [one.reset(seed=9)]
    other.reset(seed=10)
    for action in actions:
        mixed.append(one.step(action))
        other.step("Up")
    assert mixed == alone


def test_a_pickled_environment_goes_on_where_it_was() -> None:
    env = FrozenLake(size=6, is_slippery=True)
    play(env, ["Right"], 4)
    copy = pickle.loads(pickle.dumps(env))
    for action in ("Down", "Right", "Right", "Down"):
        assert copy.step(action) == env.step(action)


def test_map_seed_fixes_the_map_but_not_the_slips() -> None:
    env = FrozenLake(map_seed=3, is_slippery=True)
    maps = {env.reset(seed=seed)[1]["state_key"][0] for seed in range(20)}
    ends = {play(env, ["Right", "Down", "Right"], seed)[-1][4]["state_key"][1] for seed in range(20)}
    assert len(maps) == 1
    assert len(ends) > 1


def test_the_picture_shows_the_player_the_holes_and_the_goal(on_hand: None) -> None:
    env = FrozenLake()
    env.reset(seed=0)
    first = env.render()
    assert first.shape == (128, 128, 3)
    assert first.dtype == np.uint8
    env.step("Down")
    second = env.render()
    changed = (first != second).any(axis=2)
    assert changed[:32, :32].any()
    assert changed[32:64, :32].any()
    assert not changed[:, 32:].any()
    centres = {tuple(second[32 * row + 16, 32 * column + 16]) for row, column in ((1, 0), (1, 1), (0, 1))}
    assert len(centres) == 3  # player, hole, ice


def test_uniform_play_succeeds_about_as_often_as_measured() -> None:
    """About 19 % on 4×4 with random start and goal within eight steps."""
    rng = np.random.default_rng(0)
    env = FrozenLake(random_start_goal=True, max_steps=8)
    wins = 0
    for seed in range(1500):
        env.reset(seed=seed)
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(ACTIONS[int(rng.integers(4))])
            over = terminated or truncated
        wins += info["success"]
    assert wins / 1500 == pytest.approx(0.19, abs=0.05)


def test_it_keeps_the_contract_and_closes_twice() -> None:
    env = FrozenLake()
    assert isinstance(env, Environment)
    env.close()
    env.close()


@pytest.mark.parametrize("call", [lambda env: env.step("Up"), lambda env: env.render()])
def test_before_reset_there_is_a_clear_error(call: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="before reset"):
        call(FrozenLake())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 1}, "size is 1"),
        ({"size": True}, "size is True"),
        ({"size": "4"}, "size is '4'"),
        ({"p": 0}, "p is 0"),
        ({"p": 1.5}, "p is 1.5"),
        ({"p": math.nan}, "p is nan"),
        ({"is_slippery": "no"}, "is_slippery is 'no'"),
        ({"map_seed": -1}, "map_seed is -1"),
        ({"hole_penalty": 0.5}, "Fix: a number of at most 0, as -0.5"),
        ({"goal_reward": math.inf}, "goal_reward is inf"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"observation": "grids"}, "Did you mean 'grid'"),
        ({"split": "tset"}, "Did you mean 'test'"),
    ],
)
def test_options_that_cannot_be_used_are_reported_in_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match="frozen_lake") as caught:
        FrozenLake(**options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
