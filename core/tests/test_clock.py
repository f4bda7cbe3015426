"""The pipeline's clock: phases add up, nest, count failures, and begin anew."""

from __future__ import annotations

import time

import pytest

from turnwise.pipeline.clock import Clock


def test_phases_add_up_within_each_other_until_they_are_taken() -> None:
    clock = Clock()
    with clock.phase("step"):
        for _ in range(2):
            with clock.phase("sync"):
                time.sleep(0.02)
    with pytest.raises(ValueError, match="late"), clock.phase("save"):
        raise ValueError("late")
    assert clock.seconds("sync") >= 0.04
    assert clock.seconds("nothing") == 0.0
    taken = clock.take()
    assert list(taken) == ["sync", "step", "save"]
    assert taken["step"] >= taken["sync"]
    assert clock.take() == {}
