"""The environment `sokoban`: rules, rewards, texts, several moves a turn, determinism."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.environment import Environment, check_reset, check_step
from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_sokoban import sokoban as module
from turnwise_sokoban.rooms import Room
from turnwise_sokoban.sokoban import ACTIONS, Sokoban


def room_of(picture: str) -> Room:
    """The room of a drawing in the usual symbols."""
    rows = picture.split()
    cells = "".join(rows)
    places = {
        symbols: frozenset(i for i, cell in enumerate(cells) if cell in symbols) for symbols in ("#", "O√S", "X√", "PS")
    }
    (player,) = places["PS"]
    return Room(len(rows), len(rows[0]), tuple(cell == "#" for cell in cells), places["O√S"], places["X√"], player)


ONE = "###### #P__## #_X_## #__O## #_#### ######"
TWO = "####### #PXO__# #_X_O_# #_____# #######"


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(picture: str) -> None:
        monkeypatch.setattr(module, "make_room", lambda *options: room_of(picture))

    return use


def play(env: Sokoban, actions: list[str], seed: int = 0) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


def test_moves_pushes_and_texts_by_hand(room: Any) -> None:
    room(ONE)
    answers = play(Sokoban(), ["Up", "Right", "Down", "Left", "Down", "Right"])
    assert answers[0][0] == "# # # # # #\n# P _ _ # #\n# _ X _ # #\n# _ _ O # #\n# _ # # # #\n# # # # # #"
    assert answers[1][0] == answers[0][0]  # a wall
    assert answers[3][0] == "# # # # # #\n# _ _ _ # #\n# _ P _ # #\n# _ X O # #\n# _ # # # #\n# # # # # #"
    assert answers[6][0] == "# # # # # #\n# _ _ _ # #\n# _ _ _ # #\n# _ P √ # #\n# _ # # # #\n# # # # # #"
    assert [round(answer[1], 9) for answer in answers[1:]] == [-0.1, -0.1, -0.1, -0.1, -0.1, 10.9]
    assert [answer[2] for answer in answers[1:]] == [False] * 5 + [True]
    assert [answer[4]["success"] for answer in answers[1:]] == [False] * 5 + [True]
    assert [answer[4]["metrics"]["effective"] for answer in answers[1:]] == [0, 1, 1, 1, 1, 1]


def test_a_box_against_a_wall_or_a_box_stays(room: Any) -> None:
    room("###### #PX### #__O## ######")
    assert play(Sokoban(), ["Right"])[-1][0].splitlines()[1] == "# P X # # #"
    room("####### #PXX_O# #____O# #######")
    assert play(Sokoban(), ["Right"])[-1][0].splitlines()[1] == "# P X X _ O #"


def test_rewards_for_boxes_on_and_off_targets(room: Any) -> None:
    room(TWO)
    rewards = [answer[1] for answer in play(Sokoban(step_penalty=-0.5), ["Right", "Right"])[1:]]
    assert rewards == [0.5, -1.5]  # onto the target; off it again
    answers = play(Sokoban(step_penalty=0), ["Right", "Left", "Down", "Right", "Right"])
    assert [answer[1] for answer in answers[1:]] == [1.0, 0.0, 0.0, 0.0, 11.0]
    assert answers[-1][2] is True


def test_the_player_on_a_target_is_shown_as_such(room: Any) -> None:
    room("###### #PO_X# #__X_# #__O_# ######")
    assert play(Sokoban(), ["Right"])[-1][0].splitlines()[1] == "# _ S _ X #"


def test_several_moves_a_turn(room: Any) -> None:
    room(ONE)
    env = Sokoban(max_actions_per_turn=6)
    answer = play(env, [" right || DOWN||left || Down || Right"])[-1]
    assert round(answer[1], 9) == pytest.approx(10.5)
    assert answer[2] is True
    assert answer[4]["metrics"] == {"invalid": 0.0, "effective": 1.0}


def test_a_turn_ends_at_the_first_text_that_is_no_move_and_keeps_what_was_played(room: Any) -> None:
    room(ONE)
    _, reward, terminated, _, info = play(
        Sokoban(max_actions_per_turn=6, invalid_penalty=-1), ["Right || Jump || Down || Jump"]
    )[-1]
    assert round(reward, 9) == -1.2
    assert not terminated
    assert info["metrics"] == {"invalid": 1.0, "effective": 1.0}
    assert info["state_key"] == play(Sokoban(), ["Right"])[-1][4]["state_key"]


def test_moves_past_the_limit_are_invalid_and_not_played(room: Any) -> None:
    room(ONE)
    one = play(Sokoban(), ["Right || Down"])[-1]
    two = play(Sokoban(max_actions_per_turn=2), ["Right || Down || Left"])[-1]
    exact = play(Sokoban(max_actions_per_turn=2), ["Right || Down"])[-1]
    assert [one[4]["metrics"]["invalid"], two[4]["metrics"]["invalid"], exact[4]["metrics"]["invalid"]] == [1, 1, 0]
    assert one[4]["state_key"] == play(Sokoban(), ["Right"])[-1][4]["state_key"]
    assert two[4]["state_key"] == exact[4]["state_key"]


def test_nothing_is_played_after_the_room_is_solved(room: Any) -> None:
    room("###### #PXO_# ######")
    _, reward, terminated, truncated, info = play(Sokoban(max_actions_per_turn=3), ["Right || Right || nonsense"])[-1]
    assert (round(reward, 9), terminated, truncated) == (10.9, True, False)
    assert info["metrics"]["invalid"] == 0


def test_another_separator(room: Any) -> None:
    room(ONE)
    env = Sokoban(max_actions_per_turn=3, action_separator=",")
    assert play(env, ["Right, Down"])[-1][4]["metrics"]["invalid"] == 0
    assert "separated by ,." in env.instruction


@pytest.mark.parametrize("text", ["", "||", "Up up", "north", "<answer>Up</answer>", "Up||"])
def test_what_is_no_move_is_invalid(room: Any, text: str) -> None:
    room(ONE)
    _, reward, _, _, info = play(Sokoban(max_actions_per_turn=5), [text])[-1]
    assert info["metrics"]["invalid"] == 1
    assert reward < -0.1


def test_max_steps_counts_moves_and_invalid_texts(room: Any) -> None:
    room(ONE)
    answers = play(Sokoban(max_steps=3), ["Down", "x", "Up", "Down"])
    assert [answer[2:4] for answer in answers[1:]] == [(False, False), (False, False), (False, True), (False, True)]
    assert answers[-1][1] == 0.0
    many = play(Sokoban(max_steps=3, max_actions_per_turn=10), ["Down||Up||Down||Up"])[-1]
    assert (round(many[1], 9), many[3], many[4]["metrics"]["invalid"]) == (-0.3, True, 0)


def test_words_by_hand(room: Any) -> None:
    room(TWO)
    texts = [answer[0] for answer in play(Sokoban(describe=True), ["Right"])]
    assert texts[0].endswith(
        "\nBoxes: 1 right, 1 down 1 right.\nFree targets: 2 right, 1 down 3 right.\nWalls: Up Left."
    )
    assert texts[1].endswith("\nBoxes: 1 right (on a target), 1 down.\nFree targets: 1 down 2 right.\nWalls: Up.")


def test_other_symbols_and_their_words(room: Any) -> None:
    room(ONE)
    lookup: dict[int | str, str] = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", "6": "@"}
    env = Sokoban(grid_lookup=lookup, grid_vocab={"W": "brick", ".": "empty", "B": "crate"})
    text, info = env.reset(seed=0)
    assert text == "W W W W W W\nW A . . W W\nW . B . W W\nW . . G W W\nW . W W W W\nW W W W W W"
    assert (
        "W: brick, .: empty, G: target, C: box on target, B: crate, A: player, @: player on target"
        in info["env_instruction"]
    )
    assert info["state_key"] == Sokoban().reset(seed=0)[1]["state_key"]


def test_info_at_reset() -> None:
    _, info = check_reset(Sokoban().reset(seed=1), "sokoban")
    hash(info["state_key"])
    assert info["actions"] == ["Up", "Down", "Left", "Right"]
    assert info["success"] is False
    assert "Push every box onto a target" in info["env_instruction"]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**63),
    limit=st.integers(1, 3),
    actions=st.lists(
        st.one_of(
            st.sampled_from(ACTIONS), st.text(max_size=8), st.lists(st.sampled_from((*ACTIONS, "", "x"))).map("||".join)
        ),
        max_size=15,
    ),
)
def test_any_text_is_answered_and_the_same_seed_and_actions_give_the_same_episode(
    seed: int, limit: int, actions: list[str]
) -> None:
    def env() -> Sokoban:
        return Sokoban(
            dim_room=[6, 7], num_boxes=2, search_depth=20, max_steps=12, max_actions_per_turn=limit, describe=True
        )

    first = play(env(), actions, seed)
    for answer in first[1:]:
        _, reward, terminated, truncated, info = check_step(answer, "sokoban")
        assert math.isfinite(reward)
        assert not (terminated and truncated)
        assert info["success"] == terminated
    assert play(env(), actions, seed) == first


@settings(max_examples=40)
@given(st.integers(0, 5000), st.lists(st.sampled_from(ACTIONS), max_size=40))
def test_boxes_player_and_walls_are_conserved(seed: int, actions: list[str]) -> None:
    env = Sokoban(dim_room=(7, 7), num_boxes=2, step_penalty=0)
    texts = [answer[0] for answer in play(env, actions, seed)]
    for text in texts:
        counts = {symbol: text.count(symbol) for symbol in "#_O√XPS"}
        assert counts["X"] + counts["√"] == 2
        assert counts["O"] + counts["√"] + counts["S"] == 2
        assert counts["P"] + counts["S"] == 1
        assert [cell == "#" for cell in text.split()] == [cell == "#" for cell in texts[0].split()]


def test_global_random_state_is_untouched_and_instances_are_apart() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    alone = play(Sokoban(), list(ACTIONS), 77)
    one, other = Sokoban(), Sokoban()
    mixed: list[Any] = [one.reset(seed=77)]
    other.reset(seed=78)
    for action in ACTIONS:
        mixed.append(one.step(action))
        other.step("Left")
    other.reset()
    other.render()
    assert mixed == alone
    assert (random.random(), np.random.random()) == expected


def test_a_pickled_environment_goes_on_where_it_was() -> None:
    env = Sokoban(num_boxes=2, dim_room=[8, 8])
    play(env, ["Up", "Left"], 4)
    copy = pickle.loads(pickle.dumps(env))
    for action in ("Down", "Right", "Right", "Down"):
        assert copy.step(action) == env.step(action)


def test_the_picture_shows_every_kind_of_cell_apart(room: Any) -> None:
    room("######## #PO_X√_# #__XO__# ########")
    env = Sokoban()
    env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (128, 256, 3)
    assert picture.dtype == np.uint8
    tiles = [
        picture[32 * y : 32 * y + 32, 32 * x : 32 * x + 32].tobytes()
        for y, x in ((0, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5))
    ]
    assert len(set(tiles)) == 6
    env.step("Right")
    assert env.render()[32:64, 64:96].tobytes() not in tiles  # the player on a target


def test_it_keeps_the_contract_and_closes_twice() -> None:
    env = Sokoban()
    assert isinstance(env, Environment)
    env.close()
    env.close()


@pytest.mark.parametrize("call", [lambda env: env.step("Up"), lambda env: env.render()])
def test_before_reset_there_is_a_clear_error(call: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="before reset"):
        call(Sokoban())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dim_room": [4, 4]}, "dim_room is [4, 4]"),
        ({"dim_room": 6}, "dim_room is 6"),
        ({"dim_room": [6, 6, 6]}, "Fix: [height, width]"),
        ({"dim_room": [6, True]}, "dim_room"),
        ({"num_boxes": 0}, "num_boxes is 0"),
        ({"search_depth": 1.5}, "search_depth is 1.5"),
        ({"grid_lookup": {7: "Z"}}, "the key 7"),
        ({"grid_lookup": {0: "_"}}, "seven different symbols"),
        ({"grid_lookup": ["#"]}, "a mapping from 0"),
        ({"grid_vocab": {"Z": "zebra"}}, "the symbol 'Z'"),
        ({"grid_vocab": "walls"}, "grid_vocab is 'walls'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"step_penalty": 0.1}, "at most 0"),
        ({"invalid_penalty": math.nan}, "invalid_penalty is nan"),
        ({"max_actions_per_turn": 0}, "max_actions_per_turn is 0"),
        ({"action_separator": " "}, "action_separator is ' '"),
        ({"action_separator": "up"}, "action_separator is 'up'"),
        ({"describe": "yes"}, "describe is 'yes'"),
        ({"split": "trian"}, "Did you mean 'train'"),
    ],
)
def test_options_that_cannot_be_used_are_reported_in_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match="sokoban") as caught:
        Sokoban(**options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hook_is_lazy() -> None:
    import turnwise_sokoban

    (record,) = turnwise_sokoban.environments()
    assert (record.name, record.target) == ("sokoban", "turnwise_sokoban.sokoban:Sokoban")
