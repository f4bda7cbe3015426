"""All loggers as one: in order, and a failing one is reported once, closed, and never asked again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.logger import LoggerContext
from turnwise.pipeline.tracking import Tracking
from turnwise.testing.compare import says
from turnwise.testing.fakes import FakeLogger, FakeLoggerConfig


def logger(fails_at: int | None = None) -> FakeLogger:
    return FakeLogger(FakeLoggerConfig(fails_at), LoggerContext(Path()))


class Raises:
    """Raises in the named methods; remembers every call."""

    def __init__(self, *methods: str) -> None:
        self.methods, self.calls = methods, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            self.calls.append(name)
            if name in self.methods:
                raise OSError(f"no {name}")

        return call


def test_every_logger_receives_everything_in_order() -> None:
    one, two = logger(), logger()
    tracking = Tracking([("one", one), ("two", two)])
    tracking.scalars(3, {"a": 1.0})
    tracking.trajectories(3, "val", [])
    tracking.artifact(3, "curve", Path("c.png"))
    for each in (one, two):
        assert (each.metrics, each.played, each.artifacts) == (
            {3: {"a": 1.0}},
            {(3, "val"): []},
            [(3, "curve", Path("c.png"))],
        )
    tracking.resume(3)
    tracking.close()
    for each in (one, two):
        assert (each.resumed, each.metrics, each.closed) == ([3], {}, 1)


def test_a_failing_logger_is_reported_once_closed_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    before, bad, after = logger(), logger(fails_at=2), logger()
    tracking = Tracking([("before", before), ("bad", bad), ("after", after)])
    with caplog.at_level(logging.WARNING, "turnwise"):
        for step in range(5):
            tracking.scalars(step, {"a": float(step)})
        tracking.close()
    (record,) = caplog.records
    says(
        record.getMessage(),
        "logger bad",
        "in scalars",
        "switched off",
        "RuntimeError: the fake logger raises at step 2",
    )
    assert sorted(bad.metrics) == [0, 1]
    assert bad.closed == 1
    for healthy in (before, after):
        assert (sorted(healthy.metrics), healthy.closed) == ([0, 1, 2, 3, 4], 1)


@pytest.mark.parametrize("method", ["scalars", "trajectories", "artifact", "resume"])
def test_every_method_may_fail_even_together_with_close(method: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, healthy = Raises(method, "close"), Raises()
    tracking = Tracking([("bad", bad), ("healthy", healthy)])
    arguments = {"scalars": (0, {}), "trajectories": (0, "train", []), "artifact": (0, "x", Path()), "resume": (0,)}
    for _ in range(2):
        getattr(tracking, method)(*arguments[method])
    tracking.close()
    assert (bad.calls, healthy.calls) == ([method, "close"], [method, method, "close"])
    assert [r.getMessage() for r in caplog.records] == [
        f"logger bad failed in {method} and is switched off: OSError: no {method}"
    ]


def test_a_logger_that_fails_to_close_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    bad, healthy = Raises("close"), Raises()
    tracking = Tracking([("bad", bad), ("healthy", healthy)])
    tracking.close()
    tracking.close()
    assert (bad.calls, healthy.calls) == (["close"], ["close"])
    assert len(caplog.records) == 1


def test_failed_episodes_are_all_logged_and_the_first_of_the_run_is_told_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracking = Tracking([])  # they are no logger's affair
    with caplog.at_level(logging.INFO, "turnwise"):
        tracking.failures("step 0", [])
        tracking.failures("step 1", ["Lake, group 2: it broke.", "Lake, group 3: it hung."])
        tracking.failures("step 2", ["Lake, group 4: it broke."])
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [text for level, text in lines if level == "INFO"] == [
        "step 1: Lake, group 2: it broke.",
        "step 1: Lake, group 3: it hung.",
        "step 2: Lake, group 4: it broke.",
    ]
    (told,) = (text for level, text in lines if level == "WARNING")
    says(told, "step 1: 2 attempts failed", "the first: Lake, group 2: it broke. Later ones", "run.log")


def test_a_closed_tracking_asks_no_logger_any_more() -> None:
    one = Raises()
    tracking = Tracking([("one", one)])
    tracking.close()
    tracking.scalars(0, {"a": 1.0})
    tracking.close()
    assert one.calls == ["close"]
