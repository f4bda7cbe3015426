"""The command line on the fakes: exit codes, one line an error, what each command prints, and nothing left over between
two runs."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from toy_runs import only, plugin

from turnwise import Implementation, __version__
from turnwise.cli import main as cli
from turnwise.cli import plugins as plugin_commands
from turnwise.cli.main import main
from turnwise.cli.run import program
from turnwise.data.trajectory import Trajectory, Turn, int32
from turnwise.data.transcript import readable
from turnwise.errors import CheckpointError, ConfigError, EngineError, MachineError, PluginError, TrainerError
from turnwise.plugins import Broken, Entry, Registry
from turnwise.testing.compare import says
from turnwise.testing.fakes import FakeLogger

Toy = Callable[..., Path]
NOTE = "loaded like actor_train"
"""Of a reference that a KL coefficient calls for."""
WARNING = "has no effect: init_kl_coef is 0"
"""Of target_kl without init_kl_coef."""
NOTED = {"kl_loss_coef": 0.1, "target_kl": 0.1}


def turnwise(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


STRATEGY = """
import os, signal
from turnwise.errors import OutOfMemory, TrainerError
from turnwise.testing.fakes import FakeStrategy

class Mine(FakeStrategy):
    def update(self, update):
        {what}
        return super().update(update)

@turnwise.hookimpl
def train_strategies():
    return [Implementation("mine", Mine)]
"""


def with_strategy(toy: Toy, tmp_path: Path, what: str, **changes: Any) -> Path:
    """A run whose strategy does `what` at every update."""
    actor = {
        "strategy_args": {"strategy_name": "mine"},
        "training_args": {"per_device_train_batch_size": 2, "learning_rate": 5.0},
    }
    return toy(plugins=plugin(tmp_path, STRATEGY.format(what=what)), actor_train=actor, **changes)


# ---------------------------------------------------------------- exit codes and errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (PluginError("x"), 2),
        (MachineError("x"), 3),
        (TrainerError("x"), 1),
        (EngineError("x"), 1),
        (CheckpointError("x"), 1),
    ],
)
def test_exit_codes_follow_from_the_boundary_that_was_crossed(error: Any, code: int) -> None:
    assert cli.exit_code(error) == code


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "plan", "check"])
def test_every_mistake_in_the_configuration_is_a_line_and_exit_code_2(toy: Toy, command: str) -> None:
    got = turnwise(command, toy(gama=0.9, max_steps="many"))
    assert got.exit_code == 2
    assert got.stdout == ""
    lines = got.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
    assert "Did you mean 'gamma'?" in got.stderr


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "plan", "check"])
def test_a_file_that_is_not_there_is_one_line(toy: Toy, command: str) -> None:
    toy()
    got = turnwise(command, "toi.yaml")
    assert (got.exit_code, got.stdout) == (2, "")
    assert got.stderr.startswith("error: toi.yaml: there is no such file.")
    assert got.stderr.count("\n") == 1


def test_debug_shows_where_an_error_comes_from(toy: Toy) -> None:
    got = turnwise("--debug", "plan", toy(gama=0.9))
    assert isinstance(got.exception, ConfigError)


def test_plan_takes_the_times_of_an_earlier_run(toy: Toy) -> None:
    path = toy(track_with=["jsonl"])
    assert turnwise("train", path).exit_code == 0
    values = json.loads(turnwise("plan", path, "max_steps=30", "--json", "--from", "out").stdout)
    assert values["time"]["total"] > 30 * values["time"]["step"] > 0
    assert "time  " in turnwise("plan", path, "--from", "out").stdout
    got = turnwise("plan", path, "--from", "nowhere")
    assert (got.exit_code, got.stderr.startswith("error: --from nowhere: ")) == (2, True)


def test_plan_needs_neither_the_environment_nor_every_plugin(toy: Toy) -> None:
    absent = {"Toy": {"env_type": "not_here", "env_manager": "fake", "env_config": {"any": 1}}}
    got = turnwise(
        "plan",
        toy(
            plugins=["turnwise.testing.plugin", "./players.py", "turnwise-zzz>=2"],
            custom_envs=absent,
        ),
    )
    assert got.exit_code == 0
    lines = got.stderr.splitlines()
    assert any(
        line.startswith("warning: ") and "pip install --find-links dist 'turnwise-zzz>=2'" in line for line in lines
    )
    assert any(line.startswith("warning: ") and "no environment is named 'not_here'" in line for line in lines)
    check = turnwise("check", toy(custom_envs=absent))
    assert check.exit_code == 2
    assert [line.partition(": ")[0] for line in check.stderr.splitlines() if not line.startswith("note: ")] == [
        "config"
    ]
    assert "no environment is named 'not_here'" in check.stderr
    broken = turnwise("plan", toy(plugins=["turnwise.testing.plugin", "./players.py", "./absent.py"]))
    assert (broken.exit_code, "the file './absent.py' does not exist" in broken.stderr) == (2, True)


def test_what_the_machine_lacks_is_exit_code_3(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = toy(output_dir="file/out")
    for command, prefix in (("train", "error"), ("check", "machine")):
        got = turnwise(command, path)
        assert got.exit_code == 3
        says(only(got.stderr.splitlines()), f"{prefix}: output_dir: ", f"{tmp_path / 'file'} is not a folder", "Fix: ")


def test_version_and_help_need_no_configuration() -> None:
    assert turnwise("--version").stdout == f"turnwise, version {__version__}\n"
    shown = turnwise("-h").stdout
    assert all(
        f"\n  {command} " in shown
        for command in ("train", "eval", "rollout", "plan", "check", "plugins", "new", "test-plugin")
    )
    assert turnwise("rollout").exit_code == 2


# ---------------------------------------------------------------- train


def test_a_run_ends_with_its_report_and_how_to_watch_it(toy: Toy, tmp_path: Path) -> None:
    got = turnwise("train", toy(), "max_steps=2", "exp_name=two words")
    assert got.exit_code == 0, got.stderr
    assert got.stdout.startswith("# two words: 2 steps\n\n| player | Toy/score/mean | Toy/turns/mean | Toy/success |")
    assert (
        got.stdout.splitlines()[-1]
        == f"watch it play: {program()} rollout {tmp_path}/toy.yaml max_steps=2 'exp_name=two words' --model latest"
        " --episodes 3"
    )
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-000002" / "model" / "weights.npy").is_file()
    assert FakeLogger.latest is not None
    assert sorted(FakeLogger.latest.metrics) == [0, 1, 2]


def test_without_evaluation_nothing_is_there_to_watch(toy: Toy) -> None:
    got = turnwise("train", toy(val_env_manager=None, eval_steps=None))
    assert got.exit_code == 0
    assert got.stdout.startswith("# toy: 3 steps\n\n")
    assert "watch it play" not in got.stdout


def test_what_was_translated_is_reported_by_plan_and_check_and_logged_by_train(toy: Toy, tmp_path: Path) -> None:
    path = toy(**NOTED)
    for command in ("plan", "check"):
        got = turnwise(command, path)
        assert got.exit_code == 0
        assert re.search(rf"^note: .*{NOTE}$", got.stderr, re.MULTILINE)
        assert re.search(rf"^warning: .*{WARNING}$", got.stderr, re.MULTILINE)
    for command in (
        ("train",),
        ("eval", "--player", "first"),
        ("rollout", "--player", "first"),
        ("eval", "--player", "first", "--json"),
    ):
        got = turnwise(command[0], path, *command[1:])
        assert got.exit_code == 0, got.stderr
        assert NOTE not in got.stderr + got.stdout
        assert re.search(rf"^warning: .*{WARNING}$", got.stderr, re.MULTILINE)
    assert NOTE in (tmp_path / "out" / "run.log").read_text()


def test_a_failed_run_says_what_was_saved_and_how_to_go_on(toy: Toy, tmp_path: Path) -> None:
    raising = (
        "if self._updates >= 5: raise TrainerError('actor_train: out of memory in the update. Fix: lower"
        " per_device_train_batch_size')"
    )
    path = with_strategy(toy, tmp_path, raising, save_steps=1)
    got = turnwise("train", path, "seed=3")
    assert got.exit_code == 1
    error, saved, resume = got.stderr.splitlines()[-3:]
    says(error, "error: actor_train: out of memory in the update", "Fix: lower per_device_train_batch_size")
    assert saved == "saved: out/checkpoints/checkpoint-000002"
    assert resume == f"resume: {program()} train {path} seed=3 resume_from_checkpoint=true"
    nothing = turnwise("train", path, "save_steps=0", "output_dir=other")
    assert nothing.stderr.splitlines()[-1] == "saved: nothing yet"


def test_the_command_to_resume_repeats_no_secret(toy: Toy, tmp_path: Path) -> None:
    path = with_strategy(toy, tmp_path, "if self._updates >= 5: raise TrainerError('gone. Fix: again')", save_steps=1)
    got = turnwise("train", path, "vars.api_key=sk-0123456789")
    assert got.exit_code == 1
    assert got.stderr.splitlines()[-1].startswith(f"resume: {program()} train {path} 'vars.api_key=***' resume_")
    assert "sk-0123456789" not in got.stderr + got.stdout


def test_out_of_memory_is_one_line_with_what_was_saved_and_how_to_go_on(toy: Toy, tmp_path: Path) -> None:
    raising = (
        "if self._updates >= 5: raise OutOfMemory('out of memory, in the update of actor_train. Fix: lower"
        " infer_batch_size')"
    )
    path = with_strategy(toy, tmp_path, raising, save_steps=1)
    got = turnwise("train", path)
    assert got.exit_code == 1
    what = "error: out of memory, in the update of actor_train. Fix: lower infer_batch_size"
    assert (
        got.stderr.splitlines()[-1]
        == f"{what}; saved: out/checkpoints/checkpoint-000002; resume: {program()} train {path}"
        " resume_from_checkpoint=true"
    )
    nothing = turnwise("train", path, "save_steps=0", "output_dir=other")
    assert nothing.stderr.splitlines()[-1] == f"{what}; saved: nothing yet"


def test_an_error_that_nothing_foresaw_is_one_line_and_its_traceback_is_in_the_log(toy: Toy, tmp_path: Path) -> None:
    got = turnwise("train", with_strategy(toy, tmp_path, "raise KeyError('a plugin\\'s mistake')"))
    assert got.exit_code == 1
    assert "error: the run failed: KeyError: " in got.stderr
    assert "Traceback" not in got.stderr
    assert "Traceback" in (tmp_path / "out" / "run.log").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupted_run_saves_and_reports_how_to_resume(toy: Toy, tmp_path: Path) -> None:
    path = with_strategy(toy, tmp_path, "os.kill(os.getpid(), signal.SIGINT) if self._updates == 1 else None")
    got = turnwise("train", path)
    assert got.exit_code == 130
    assert got.stderr.splitlines()[-3:] == [
        "stopped after 1 of 3 steps; saved out/checkpoints/checkpoint-000001",
        "saved: out/checkpoints/checkpoint-000001",
        f"resume: {program()} train {path} resume_from_checkpoint=true",
    ]
    with pytest.raises(KeyboardInterrupt):  # the process's own answer to Ctrl-C is back
        signal.raise_signal(signal.SIGINT)


def test_nothing_of_a_run_is_left_in_the_process_after_it(toy: Toy, tmp_path: Path) -> None:
    log = logging.getLogger("turnwise")
    before = (log.level, list(log.handlers))
    assert turnwise("train", toy(**NOTED), "output_dir=one").exit_code == 0
    first = (tmp_path / "one" / "run.log").read_text()
    assert turnwise("train", toy(**NOTED), "output_dir=two", "logging_dir=logs").exit_code == 0
    assert (
        turnwise("train", with_strategy(toy, tmp_path, "raise TrainerError('no')"), "output_dir=three").exit_code == 1
    )
    assert (log.level, list(log.handlers)) == before
    assert (tmp_path / "one" / "run.log").read_text() == first
    assert (tmp_path / "logs" / "run.log").is_file()
    assert not (tmp_path / "two" / "run.log").exists()


# ---------------------------------------------------------------- plan and check


def test_the_plan_of_a_small_file_as_text_and_as_json(toy: Toy) -> None:
    got = turnwise("plan", toy(), "max_steps=5", "ppo_epochs=2")
    assert got.exit_code == 0
    assert "batch          2 groups × 2 = 4 trajectories a step\n" in got.stdout
    assert "updates        4 a step, 20 in 5 steps\n" in got.stdout
    assert "ROLL" not in got.stdout  # this file has no key of another framework
    assert got.stderr == ""
    field = turnwise("plan", toy(rpc_timeout=60))
    assert "note: loss_agg_mode = token-mean (ROLL's default is seq-mean-token-mean)\n" in field.stdout
    values = json.loads(turnwise("plan", toy(**NOTED, rpc_timeout=60), "--json", "max_steps=5").stdout)
    assert (values["updates"], values["trajectories"], values["evaluations"], values["evaluation_trajectories"]) == (
        [10, 10],
        20,
        3,
        9,
    )
    assert values["learning_rate"] == {"start": 5.0, "middle": 5.0, "end": 5.0}
    assert any(NOTE in note for note in values["notes"])
    assert values["notes"][-1].startswith("loss_agg_mode = token-mean")
    assert WARNING in values["warnings"][0]


def test_the_plan_warns_of_a_warm_up_without_effect(toy: Toy) -> None:
    got = turnwise("plan", toy(), "actor_train.training_args.warmup_steps=2")
    says(
        got.stdout.splitlines()[-1],
        "warning: warmup_steps = 2",
        "lr_scheduler_type constant",
        "Fix: constant_with_warmup",
    )


def test_check_sorts_its_findings_and_the_configuration_comes_first(toy: Toy, tmp_path: Path) -> None:
    path = toy()
    good = turnwise("check", path)
    assert (good.exit_code, good.stdout) == (0, f"{path}: ready to train\n")
    (tmp_path / "file").write_text("")
    got = turnwise("check", path, "output_dir=file", "actor_train.training_args.lr_scheduler_type=cosin")
    assert got.exit_code == 2
    config, machine = got.stderr.splitlines()
    place = (
        "override 'actor_train.training_args.lr_scheduler_type=cosin': $.actor_train.training_args.lr_scheduler_type"
    )
    assert config.startswith(f"config: {place}: 'cosin' is unknown. Did you mean 'cosine'?")
    says(machine, "machine: output_dir: ", f"{tmp_path / 'file'} is not a folder", "Fix: ")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["file", "players.py", "toy.yaml"]


# ---------------------------------------------------------------- eval and rollout


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


# ---------------------------------------------------------------- plugins and test-plugin


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Two loggers of one name, an alias that is another's name, a missing package, and a broken plugin."""

    def entry(name: str, dist: str, **more: Any) -> Entry:
        return Entry("logger", Implementation(name, object, **more), dist, dist, "1.0")

    known = Registry(
        entries=[
            entry("csv", "one"), entry("csv", "two"), entry("wall", "one", requires="tw_absent", summary="paints"), entry("ink", "one"),
            entry("pen", "two", aliases=("ink",)), entry("fine", "one", aliases=("nice",)),
        ],
        broken=[Broken("torn", "turnwise-torn", "0.1", "ImportError: no x")],
    )  # fmt: skip
    monkeypatch.setattr(plugin_commands, "registry", lambda: known)
    return known


def test_the_list_shows_status_duplicates_and_what_is_broken(listing: Registry) -> None:
    got = turnwise("plugins")
    assert got.exit_code == 0
    rows = [line.split(maxsplit=4) for line in got.stdout.splitlines()]
    assert rows[0][:4] == ["kind", "name", "distribution", "version"]
    assert [(row[1], row[4]) for row in rows[1:]] == [
        ("csv", "duplicate"),
        ("csv", "duplicate"),
        ("fine", "ok"),
        ("ink", "duplicate"),
        ("pen", "duplicate"),
        ("wall", "missing: tw_absent         paints"),
        ("torn", "broken: ImportError: no x"),
    ]
    assert got.stdout.splitlines()[-1] == "plugin  torn  turnwise-torn  0.1      broken: ImportError: no x"


def test_the_list_as_json_holds_the_same_and_the_aliases(listing: Registry) -> None:
    rows = json.loads(turnwise("plugins", "--json").stdout)
    assert {row["name"]: row["status"] for row in rows}["torn"] == "broken: ImportError: no x"
    assert next(row for row in rows if row["name"] == "fine") == {
        "kind": "logger", "name": "fine", "distribution": "one", "version": "1.0", "status": "ok", "aliases": ["nice"], "summary": "",
    }  # fmt: skip


def test_an_empty_list_is_a_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_commands, "registry", Registry)
    assert turnwise("plugins").stdout == "kind  name  distribution  version  status  summary\n"
    assert turnwise("plugins", "--json").stdout == "[]\n"


def test_test_plugin_runs_the_kit_on_a_name_or_on_all_of_a_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def conformance(name: str, kind: str | None = None, strict: bool = False) -> int:
        asked.append((name, kind, strict))
        return 1 if name == "second" else 0

    monkeypatch.setattr("turnwise.testing.kit.run_conformance", conformance)
    toy()
    assert (
        turnwise(
            "test-plugin", "first", "--plugin", "./players.py", "--kind", "inference_backend", "--strict"
        ).exit_code
        == 0
    )
    Path("two.py").write_text(
        Path("players.py")
        .read_text()
        .replace('"first", First)', '"one", First), turnwise.Implementation("second", First)')
    )
    assert turnwise("test-plugin", "./two.py").exit_code == 1
    assert asked == [
        ("first", "inference_backend", True),
        ("one", "inference_backend", False),
        ("second", "inference_backend", False),
    ]


@pytest.mark.parametrize("kind", ["logger", "inference_backends"])
def test_a_file_of_which_nothing_was_tested_does_not_pass(kind: str, toy: Toy) -> None:
    toy()
    got = turnwise("test-plugin", "./players.py", "--kind", kind)
    assert got.exit_code == 2
    assert "nothing was tested" in got.stderr


def test_test_plugin_without_pytest_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "turnwise.testing.kit", None)
    got = turnwise("test-plugin", "first")
    assert (got.exit_code, got.stderr) == (
        3,
        "error: test-plugin needs pytest and hypothesis. Fix: pip install 'turnwise[testing]'.\n",
    )


def test_a_key_that_preflight_finds_at_fault_has_its_file_and_line(toy: Toy, tmp_path: Path) -> None:
    path = toy(
        actor_train={"strategy_args": {"strategy_name": "fake"}, "device_mapping": [0, 1]},
        runtime="local",
    )
    line = 1 + path.read_text().splitlines().index("  device_mapping:")
    for command, label in (("check", "config"), ("train", "error")):
        got = turnwise(command, path)
        assert got.exit_code == 2
        assert (
            f"{label}: {path}:{line}: $.actor_train.device_mapping: 2 devices are as many training processes"
            in got.stderr
        )
