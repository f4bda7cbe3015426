"""`plan` and what training does agree: updates of every step and their learning rates, actor and critic, for every
batch-adjust policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turnwise.cli.main import main
from turnwise.plugins import reset_registry

POLICIES = ("by_trajectory", "copy", "delete", "random_sample", "auto", "none")
GROUPS, SIZE, STEPS, RATE = 2, 3, 3, 0.5


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    reset_registry()
    yield
    reset_registry()


def role(micro: int, accumulation: int, **args: Any) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return {
        "strategy_args": {"strategy_name": "fake"},
        "training_args": {"learning_rate": RATE, "lr_scheduler_type": "linear", **sizes, **args},
    }


def run_of(
    manager: Any, turns: int, most: int, policy: str, epochs: int, actor: dict[str, Any], critic: dict[str, Any] | None
) -> dict[str, Any]:
    """Every episode has `turns` turns, of `most` that it may have; every turn samples something."""
    return {
        "plugins": ["turnwise.testing.plugin"],
        "pretrain": "fake",
        "model_source": "fake",
        "max_steps": STEPS,
        "rollout_batch_size": GROUPS * SIZE,
        "sequence_length": 4096,
        "adv_estimator": "gae" if critic else "grpo",
        "pg_variant": "fake_loss",
        "ppo_epochs": epochs,
        "batch_adjust_mode": policy,
        "actor_train": actor,
        "actor_infer": {"strategy_args": {"strategy_name": "fake"}, "generating_args": {"max_new_tokens": 2}},
        **({"critic": critic} if critic else {}),
        "train_env_manager": {"num_env_groups": GROUPS, "group_size": SIZE},
        "custom_envs": {
            "F": {
                "env_type": "fake",
                "env_manager": manager,
                "max_steps": most,
                "step": "inline",
                "env_config": {"length": turns},
            }
        },
        "track_with": ["jsonl"],
    }


def turnwise(*arguments: Any) -> str:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def assert_agrees(plan: dict[str, Any], steps: list[dict[str, float]], who: str, exact: bool, warmup: int = 0) -> None:
    """`exact`: every episode is as long as it may be, so that the plan's most is what happens."""
    low, high = plan["updates_per_step"]
    counts = [int(step[f"{who}/updates"]) for step in steps]
    assert all(low <= n <= high for n in counts), (counts, low, high)
    if exact:
        assert counts == [high] * STEPS
    for p, (n, step) in enumerate(zip(counts, steps)):
        x = p + (n - 1) / n
        expected = x / warmup if x < warmup else (STEPS - x) / (STEPS - warmup)
        assert step[f"{who}/learning_rate"] == pytest.approx(RATE * expected)
    assert plan["warmup_updates"] == [warmup * low, warmup * high]


@settings(max_examples=25)
@given(
    stepwise=st.booleans(),
    turns=st.integers(1, 4),
    spare=st.integers(0, 2),
    policy=st.sampled_from(POLICIES),
    epochs=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    critics=st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_training_makes_the_updates_that_plan_reports_at_the_rates_of_their_progress(
    tmp_path_factory: pytest.TempPathFactory,
    stepwise: bool,
    turns: int,
    spare: int,
    policy: str,
    epochs: int,
    sizes: Any,
    critics: Any,
) -> None:
    fits = all(
        GROUPS * SIZE % (micro * accumulation) == 0 for micro, accumulation in [sizes, *([critics] if critics else [])]
    )
    assume(policy != "by_trajectory" or fits)
    folder = tmp_path_factory.mktemp("run")
    critic = role(*critics, warmup_steps=1) if critics else None
    run = run_of("stepwise" if stepwise else "trajectory", turns, turns + spare, policy, epochs, role(*sizes), critic)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**run, "output_dir": str(folder / "out")}), encoding="utf-8")
    plan = json.loads(turnwise("plan", file, "--json"))
    turnwise("train", file)
    lines = (Path(folder) / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == STEPS
    assert [step["rollout/samples"] for step in steps] == [GROUPS * SIZE * (turns if stepwise else 1)] * STEPS
    assert_agrees(plan, steps, "policy", exact=spare == 0 or not stepwise)
    assert (plan["critic"] is None) == (critic is None)
    if critic is not None:
        assert_agrees(plan["critic"], steps, "critic", exact=spare == 0 or not stepwise, warmup=1)
