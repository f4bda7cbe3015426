"""`turnwise train` on the fakes: its end, its failures, how to go on, and nothing left over between two runs."""

from __future__ import annotations

import logging
import re
import signal
import sys
from pathlib import Path

import pytest
from toy_runs import NOTE, NOTED, WARNING, Toy, turnwise, with_strategy

from turnwise.cli.run import program
from turnwise.testing.compare import says
from turnwise.testing.fakes import FakeLogger


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
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell has started the tests in the background
    got = turnwise("train", path)
    assert got.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before  # the process's own answer to Ctrl-C is back
    assert got.stderr.splitlines()[-3:] == [
        "stopped after 1 of 3 steps; saved out/checkpoints/checkpoint-000001",
        "saved: out/checkpoints/checkpoint-000001",
        f"resume: {program()} train {path} resume_from_checkpoint=true",
    ]


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
