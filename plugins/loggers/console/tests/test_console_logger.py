"""The console logger's lines, its bar and its restraint."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from turnwise.contracts.logger import LoggerContext
from turnwise_console.config import DEFAULT_KEYS, ConsoleConfig
from turnwise_console.lines import duration, evaluation_lines, select, step_line
from turnwise_console.logger import ConsoleLogger


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_step_line_shows_the_keys_in_their_order_and_leaves_out_the_rest() -> None:
    metrics = {
        "policy/loss": -0.01234567,
        "critic/score/mean": 0.5,
        "tokens/prompt_length/max": 91.0,
        "time/step": 3.21,
    }
    assert step_line(metrics, DEFAULT_KEYS).split() == ["score", "0.5", "loss", "-0.01235", "time", "3.2s"]


def test_a_star_stands_for_a_tag_that_is_named_only_when_there_are_several() -> None:
    assert step_line({"env/Lake/success": 0.25}, ["env/*/success"]) == "success 0.25"
    two = step_line({"env/Lake/success": 0.25, "env/Room/success": 1.0}, ["env/*/success"])
    assert two.split() == ["success[Lake]", "0.25", "success[Room]", "1"]


def test_a_metric_is_shown_once_though_two_keys_match_it() -> None:
    assert [item.label for item in select({"env/a/success": 1.0}, ["env/a/success", "env/*/success"])] == [
        "env/a/success"
    ]


def test_names_are_matched_literally_apart_from_the_star() -> None:
    assert step_line({"policy/loss+": 1.0, "policyxloss": 2.0}, ["policy.loss", "policy/loss+"]) == "policy/loss+ 1"


def test_evaluation_has_one_line_per_tag() -> None:
    lines = evaluation_lines(
        {"val/Lake/success": 0.5, "val/Room/success": 0.25, "val/Lake/score/mean": 0.75},
        ["val/*/success", "val/*/score/mean"],
    )
    assert [line.split() for line in lines] == [
        ["Lake", "success", "0.5", "score", "0.75"],
        ["Room", "success", "0.25"],
    ]


def test_without_a_terminal_every_step_is_one_unwrapped_line() -> None:
    console = plain_console()
    logger = ConsoleLogger(ConsoleConfig(), LoggerContext(Path(), max_steps=10), console)
    metrics = dict.fromkeys(
        (
            "critic/score/mean",
            "policy/loss",
            "policy/entropy",
            "policy/approx_kl",
            "policy/kl",
            "policy/learning_rate",
            "time/step",
        ),
        0.123456,
    )
    logger.scalars(3, metrics)
    logger.scalars(4, {"val/Lake/success": 0.5})
    first, second = printed(console).splitlines()
    assert first.startswith("step  3/10  score 0.1235")
    assert "eta 0:00:00" in first
    assert second == "eval  4/10  Lake  success 0.5"


def test_nan_and_unknown_names_and_empty_metrics_are_survived() -> None:
    console = plain_console()
    logger = ConsoleLogger(ConsoleConfig(), LoggerContext(Path()), console)
    logger.scalars(0, {"policy/loss": math.nan, "new/metric": 1.0})
    logger.scalars(1, {"new/metric": 1.0})
    logger.scalars(2, {})
    assert printed(console).splitlines() == ["step 0  loss nan"]


def test_markup_in_a_tag_is_text() -> None:
    console = plain_console()
    ConsoleLogger(ConsoleConfig(), LoggerContext(Path()), console).scalars(0, {"val/[red]x/success": 1.0})
    assert "[red]x  success 1" in printed(console)


def test_keys_of_the_config_replace_the_default() -> None:
    console = plain_console()
    logger = ConsoleLogger(ConsoleConfig(keys=("system/cpu_memory",)), LoggerContext(Path()), console)
    logger.scalars(0, {"critic/score/mean": 1.0, "system/cpu_memory": 2.0})
    assert printed(console) == "step 0  system/cpu_memory 2\n"


def test_on_a_terminal_a_bar_shows_reward_and_eta_and_close_removes_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, legacy_windows=False)
    logger = ConsoleLogger(ConsoleConfig(), LoggerContext(Path(), exp_name="lake", max_steps=4), console)
    try:
        logger.scalars(1, {"critic/score/mean": 0.75})
        assert logger._bar is not None
        logger._bar.refresh()
        shown = printed(console)
        assert "lake" in shown
        assert "2/4" in shown
        assert "reward 0.75" in shown
        assert "eta 0:00:00" in shown
    finally:
        logger.close()
        logger.close()
    logger.scalars(2, {"critic/score/mean": 0.8})
    assert "step 2/4  score 0.8" in printed(console)


def test_progress_false_draws_no_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    assert ConsoleLogger(ConsoleConfig(progress=False), LoggerContext(Path(), max_steps=4), console)._bar is None


def test_eta_after_a_resume_counts_the_steps_of_this_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("turnwise_console.logger.time.monotonic", lambda: now[0])
    console = plain_console()
    logger = ConsoleLogger(ConsoleConfig(), LoggerContext(Path(), max_steps=100), console)
    logger.resume(90)
    now[0] = 110.0  # two steps in ten seconds, eight to go
    logger.scalars(91, {"critic/score/mean": 0.0})
    assert "eta 0:00:40" in printed(console)


def test_duration_is_hours_minutes_seconds() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3725)] == ["0:00:00", "0:01:00", "1:02:05"]


def test_the_module_with_the_hooks_names_its_logger() -> None:
    from turnwise_console import loggers

    (record,) = loggers()
    assert (record.name, record.requires) == ("console", ("rich",))


def test_idle_times_are_shown_as_shares_of_the_step() -> None:
    metrics = {"time/step": 4.0, "time/trainer_idle": 1.0, "time/sampler_idle": 0.1}
    shown = {item.label: item.text for item in select(metrics, DEFAULT_KEYS)}
    assert shown == {"time": "4.0s", "trainer idle": "25%", "sampler idle": "2%"}
    assert [item.text for item in select({"time/trainer_idle": 1.0}, DEFAULT_KEYS)] == ["1.0s"]
