"""The texts that a tokenizer is trained on: episodes under the run's own limits, and a failure that says what was being
done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.config.loader import load
from turnwise.errors import EnvironmentFailure
from turnwise.planning import assembly

HANGS = """
import threading
import turnwise

class Hangs:
    def reset(self, *, seed=None, options=None):
        return "go", {}
    def step(self, action):
        threading.Event().wait(20)

@turnwise.hookimpl
def environments():
    return [turnwise.Implementation("hangs", Hangs)]
"""


def test_an_environment_that_hangs_is_given_up_by_the_runs_own_limits(toy: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(HANGS, encoding="utf-8")
    path = toy(
        plugins=["turnwise.testing.plugin", "./players.py", "./more.py"],
        custom_envs={"Toy": {"env_type": "hangs", "env_manager": "fake"}},
    )
    overrides = [
        "train_env_manager.step_timeout=0.02",
        "train_env_manager.max_env_retries=0",
        "train_env_manager.max_env_failure_rate=0.01",
    ]
    config = load(path, [*overrides, "val_env_manager=null", "eval_steps=null"]).config
    with pytest.raises(EnvironmentFailure) as caught:
        list(assembly.texts(config, path.parent))
    text = str(caught.value)
    assert text.startswith(
        "random episodes of Toy, from which the recipe's tokenizer learns: 1 attempts to play an episode failed"
    )
    assert "max_env_failure_rate: 0.01" in text
    assert "within 0.02 s (step_timeout). Fix:" in text
