"""`turnwise eval` and `turnwise rollout` on the fakes: what is played, printed and rendered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from toy_runs import Toy, only, plugin, turnwise

from turnwise.data.trajectory import Trajectory, Turn, int32
from turnwise.data.transcript import readable
from turnwise.testing.compare import says


def test_a_player_is_evaluated_as_json_and_as_text(toy: Toy) -> None:
    got = turnwise("eval", toy(), "--player", "first", "--json", "--episodes", 5)
    values = json.loads(got.stdout)
    assert (
        values["val/Toy/score/mean"],
        values["val/Toy/success"],
        values["val/Toy/failed"],
        values["val/Toy/turns/mean"],
    ) == (3.0, 1.0, 0.0, 3.0)
    text = turnwise("eval", toy(), "--player", "first", "max_steps=1").stdout
    assert "val/Toy/success                          1\n" in text


def test_episodes_that_could_not_be_played_are_reported_and_json_stays_json(toy: Toy) -> None:
    envs = {
        "Toy": {"env_type": "fake", "env_manager": "fake"},
        "Bad": {"env_type": "fake", "env_manager": "fake", "env_config": {"fails": "raise"}},
    }
    val = {
        "num_env_groups": 3,
        "group_size": 1,
        "tags": ["Toy", "Bad"],
        "max_env_retries": 0,
        "max_env_failure_rate": 0.5,
    }
    path = toy(custom_envs=envs, val_env_manager=val)
    got = turnwise("eval", path, "--player", "first", "--json")
    assert json.loads(got.stdout, parse_constant=pytest.fail)["val/Bad/score/mean"] is None
    got = turnwise("eval", path, "--player", "first")
    assert got.exit_code == 0
    assert re.search(r"^failed: .*the fake environment raises at turn 1", got.stderr, re.MULTILINE)
    assert turnwise("eval", path, "--player", "first", "--tag", "Bad").exit_code == 1


def test_the_model_of_a_run_is_evaluated_by_any_of_its_names(toy: Toy, tmp_path: Path) -> None:
    path = toy()
    missing = turnwise("eval", path, "--model", "latest")
    assert missing.exit_code == 1
    says(only(missing.stderr.splitlines()), "error: out/checkpoints holds no checkpoint", "Fix: train first, or name ")
    before = json.loads(turnwise("eval", path, "--json").stdout)
    assert turnwise("train", path).exit_code == 0
    folder = tmp_path / "out" / "checkpoints" / "checkpoint-000003"
    after = [
        json.loads(turnwise("eval", path, "--json", "--model", name).stdout)
        for name in ("latest", folder, folder / "model")
    ]
    assert after[0] == after[1] == after[2]
    assert after[0]["val/Toy/score/mean"] != before["val/Toy/score/mean"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--player", "furst"), "no inference backend is named 'furst'. Did you mean 'first'?"),
        (("--tag", "Tuy"), "--tag 'Tuy' is not in custom_envs. It holds: Toy. Fix: one of them"),
        (("--model", "nowhere"), "--model: 'nowhere' is no folder."),
    ],
)
@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_names_that_do_not_exist_are_one_line(toy: Toy, command: str, options: tuple[str, str], expected: str) -> None:
    got = turnwise(command, toy(), *options)
    assert (got.exit_code, got.stdout) == (2, "")
    assert got.stderr.startswith(f"error: {expected}")


def test_without_evaluation_tasks_training_ones_can_be_played(toy: Toy) -> None:
    path = toy(val_env_manager=None, eval_steps=None)
    got = turnwise("rollout", path, "--player", "first")
    assert (got.exit_code, "`turnwise rollout --split train` plays" in got.stderr) == (2, True)
    assert turnwise("rollout", path, "--player", "first", "--split", "train").stdout.count("=== Toy") == 1


def test_episodes_are_printed_turn_by_turn(toy: Toy) -> None:
    got = turnwise("rollout", toy(), "--player", "first", "--episodes", 2)
    assert got.exit_code == 0
    first = got.stdout.split("\n\n")[0].splitlines()
    start = int(first[2].removeprefix("count "))
    assert first == [
        "=== Toy, task 0, member 0",
        "--- turn 0", f"count {start}", "> 'a'", "reward 1",
        "--- turn 1", f"count {start + 1}", "> 'a'", "reward 1",
        "--- turn 2", f"count {start + 2}", "> 'a'", "reward 1",
        "--- end", f"count {start + 3}", "score 3, stopped by terminated, success",
    ]  # fmt: skip
    assert got.stdout.count("=== Toy, task") == 2


def test_another_seed_plays_other_tasks(toy: Toy) -> None:
    shown = [
        turnwise("rollout", toy(), "--player", "first", *more).stdout for more in ((), ("--seed", 0), ("--seed", 1))
    ]
    assert shown[0] == shown[1] != shown[2]


def test_rendered_episodes_become_files(toy: Toy, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    got = turnwise("rollout", toy(), "--player", "first", "--episodes", 2, "--render", tmp_path / "gif")
    assert re.findall(r"wrote .*/gif/(.*)", got.stdout) == ["Toy-0-0.gif", "Toy-1-0.gif"]
    got = turnwise("rollout", toy(), "--player", "first", "--render", tmp_path / "png", "--still")
    assert re.findall(r"wrote .*/png/(.*)", got.stdout) == [f"Toy-0-0-{k:03d}.png" for k in range(4)]


def test_in_the_debugger_the_environment_runs_on_the_main_thread(toy: Toy, tmp_path: Path) -> None:
    env = """
import threading
from turnwise.testing.fakes import FakeEnvironment

class Here(FakeEnvironment):
    def step(self, action):
        print("thread:", threading.current_thread() is threading.main_thread())
        return super().step(action)

@turnwise.hookimpl
def environments():
    return [Implementation("here", Here)]
"""
    path = toy(
        plugins=plugin(tmp_path, env),
        custom_envs={"Toy": {"env_type": "here", "env_manager": "fake", "step": "thread"}},
    )
    shown = turnwise("rollout", path, "--player", "first", "--episodes", 3).stdout
    assert (shown.count("thread: False"), shown.count("thread: True")) == (9, 0)
    shown = turnwise("rollout", path, "--player", "first", "--episodes", 3, "--debug").stdout
    assert (shown.count("thread: False"), shown.count("thread: True")) == (0, 3)  # and one episode alone


def test_observations_of_every_form_are_readable() -> None:
    image = {"type": "image", "image": np.zeros((1, 1, 3), np.uint8)}
    seen = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
    ]
    nothing, mask = int32([]), np.zeros(0, np.bool_)
    turn = Turn(nothing, nothing, mask, None, nothing, 0.5, None, seen, " <a>left</a> ", "left")
    plain = Turn(nothing, nothing, mask, None, nothing, -1.0, None, [{"type": "text", "text": "wall"}], "up", "up")
    assert readable(Trajectory("T", 4, 1, 0, (turn, plain), "length", None, final_observation="end")).splitlines() == [
        "=== T, task 4, member 1",
        "--- turn 0", "rules", "look", "[image]", "> '<a>left</a>' → 'left'", "reward 0.5",
        "--- turn 1", "wall", "> 'up'", "reward -1",
        "--- end", "end", "score -0.5, stopped by length",
    ]  # fmt: skip
