"""Updates without a step: how many in a row a run bears."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import TrainerError
from turnwise.pipeline.skipped import Skipped

UPDATE = Update(Rows(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool)), lr=1e-6)
SOUND, BROKEN = UpdateResult(1.0, 0.5), UpdateResult(math.nan, math.inf, skipped=True)


def test_the_run_goes_on_while_no_more_than_the_limit_come_in_a_row(caplog: Any) -> None:
    skipped = Skipped("actor_train", 2)
    for result in (BROKEN, BROKEN, SOUND, BROKEN, BROKEN):
        skipped.count(UPDATE, result)
    assert len(caplog.records) == 4
    with pytest.raises(
        TrainerError, match=r"^3 update\(s\) of actor_train in a row .*gradient norm inf, learning rate 1e-06\)\. Fix: "
    ) as caught:
        skipped.count(UPDATE, BROKEN)
    assert "\n" not in str(caught.value)


def test_a_limit_of_zero_bears_none() -> None:
    with pytest.raises(TrainerError, match=r"^1 update\(s\) of critic"):
        Skipped("critic", 0).count(UPDATE, BROKEN)
