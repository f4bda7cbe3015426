"""The three reference set-ups of the field, as YAMLs with its own keys: `plan` prints their numbers without engine,
device or weights."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from turnwise.cli.main import main
from turnwise.config import load

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SET_UPS = {"A": "vision_agent_zero3.yaml", "B": "agent_megatron_async.yaml", "C": "rlvr_megatron_async.yaml"}


def turnwise(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def planned(name: str, *more: str) -> dict[str, Any]:
    done = turnwise("plan", EXAMPLES / SET_UPS[name], "--json", *more)
    assert done.exit_code == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("A", (8, 16, 256, [2, 2], [2048, 2048], 524_288, 103, 52_736, 1)),
        ("B", (4, 8, 1024, [1, 1], [1024, 1024], 1_048_576, 103, 105_472, 1)),
        ("C", (8, 8, 512, [1, 1], [1000, 1000], 512_000, 0, 0, 0)),
    ],
)
def test_the_numbers_of_a_set_up(name: str, numbers: tuple[Any, ...]) -> None:
    keys = (
        "data_parallel_size", "mini_batch", "unit", "updates_per_step", "updates", "trajectories", "evaluations", "evaluation_trajectories",
        "evaluations_at_end",
    )  # fmt: skip
    values = planned(name)
    assert tuple(values[key] for key in keys) == numbers


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("A", 3_754_622_976), ("B", 494_032_768), ("C", 7_615_616_512)],  # as their makers publish them
)
def test_the_models_are_known_by_their_architecture(name: str, parameters: int) -> None:
    assert planned(name)["model"]["parameters"] == parameters


def test_memory_of_the_set_ups_by_hand() -> None:
    count = 3_754_622_976
    infer, train = planned("A")["memory"]
    assert (infer["weights"], infer["kv_cache"]) == (2 * count, int(0.6 * 40e9) - 2 * count - infer["activations"])
    assert (train["weights"], train["gradients"], train["optimizer"]) == (
        2 * count // 8,
        4 * count // 8,
        12 * count // 8,
    )
    count = 7_615_616_512
    infer, train = planned("C", "--device-gb", "80")["memory"]
    assert infer["weights"] + infer["kv_cache"] == int(0.85 * 80e9)
    assert (train["weights"], train["gradients"], train["optimizer"]) == (count, 2 * count, count // 2 * 12 // 8)


def test_images_of_a_vision_model_are_estimated_at_most() -> None:
    values = planned("A")
    assert (
        values["cpu"]["images"] == 512 * 8192 * 4 * 14 * 14 * 3
    )  # every token of an image: 2 × 2 patches of 14² pixels
    assert values["memory"][1]["images"] > 0
    assert "images" not in planned("B")["cpu"]


def test_warm_up_is_reported_in_updates() -> None:
    assert (planned("B")["warmup_updates"], planned("C")["warmup_updates"], planned("A")["warmup_updates"]) == (
        [10, 10],
        [1, 1],
        [0, 0],
    )
    assert "warm-up        10 pipeline steps = 10 updates" in turnwise("plan", EXAMPLES / SET_UPS["B"]).stdout


def test_sixteen_rows_of_8192_tokens_are_reported_as_too_much_for_40_gigabytes() -> None:
    more = (
        "actor_train.training_args.per_device_train_batch_size=16",
        "actor_train.training_args.gradient_accumulation_steps=2",
    )
    (line,) = [w for w in planned("A", *more)["warnings"] if w.startswith("actor_train: ")]
    assert (
        "is too much for a device of 40 GB. Fix: lower per_device_train_batch_size (16; raise"
        " gradient_accumulation_steps)" in line
    )
    assert not [w for w in planned("A", *more, "--device-gb", "80")["warnings"] if w.startswith("actor_train: ")]
    assert not [w for w in planned("A")["warnings"] if w.startswith("actor_train: ")]


LACKS = {
    "A": (("needs 8 GPUs, found 0",), ("no environment is named 'click_and_read'",)),
    "B": (("needs 4 GPUs, found 0", "needs 8 GPUs, found 0"), ()),
    "C": (
        ("needs 16 GPUs, found 0", "needs 24 GPUs, found 0"),
        (),
    ),
}
"""What the machine lacks, and what Turnwise does."""


@pytest.mark.parametrize("where", ["", pytest.param("engines", marks=pytest.mark.engines)])
@pytest.mark.parametrize("name", SET_UPS)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_set_up_is_right_and_what_is_not_here_is_reported_apart(
    name: str, command: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where and importlib.util.find_spec("vllm") is None:
        pytest.skip("the engines are not installed here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    python = os.environ.get("TURNWISE_SGLANG_PYTHON", "") if where and name == "C" else ""
    refused = turnwise(
        command,
        EXAMPLES / SET_UPS[name],
        *[f"actor_infer.strategy_args.strategy_config.python={python}"] * bool(python),
    )
    machine, product = LACKS[name]
    assert refused.exit_code == (2 if product else 3)
    told = [line for line in refused.stderr.splitlines() if not line.startswith(("note: ", "warning: "))]
    wrong = "config: " if command == "check" or not product else "error: "
    lacking = "machine: " if command == "check" or product else "error: "
    assert [lack for lack in machine if not any(lack in line for line in told if line.startswith(lacking))] == []
    assert [lack for lack in product if not any(lack in line for line in told if line.startswith(wrong))] == []
    assert len([line for line in told if line.startswith(wrong)]) == len(product)
    assert not any(len(line) > 600 for line in told)


@pytest.mark.parametrize(("name", "absent"), [("A", "click_and_read")])
def test_an_environment_that_is_not_installed_is_a_warning_of_plan(name: str, absent: str) -> None:
    assert any(f"no environment is named {absent!r}" in w for w in planned(name)["warnings"])


def test_the_field_s_includes_templates_and_class_paths_arrive() -> None:
    loaded = load(EXAMPLES / SET_UPS["B"], planning=True)
    env = loaded.config.custom_envs["FrozenLake"]
    assert (env.env_manager.name, env.max_steps, env.max_tokens_per_step, env.max_env_step_concurrent) == (
        "trajectory",
        10,
        128,
        1,
    )
    assert env.env_manager.config.action_pattern == "<answer>(.*?)</answer>"
    assert env.env_manager.config.format_penalty == -0.05
    assert "{actions_left}" in env.env_manager.config.agent_template
    assert loaded.config.async_generation_ratio == 1
    assert any("1 switches train_infer_correction.is_weight on" in note for note in loaded.notes)


def test_the_text_holds_the_estimates() -> None:
    done = turnwise("plan", EXAMPLES / SET_UPS["A"])
    names = [line[:14].strip() for line in done.stdout.splitlines() if line[:14].strip() and ":" not in line[:8]]
    assert names == [
        "batch", "rows", "unit", "updates", "trajectories", "evaluations", "learning rate", "tokens", "model", "memory", "main memory", "disk",
    ]  # fmt: skip


def test_updates_of_every_policy_where_turns_are_rows() -> None:
    more = "env_manager_cls=roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
    base = planned("B", more)
    assert base["rows_per_step"] == [1024, 10_240]
    policies = base["updates_by_policy"]
    assert {name: policies[name] for name in ("by_trajectory", "copy", "random_sample", "none")} == {
        "by_trajectory": [1, 1],
        "copy": [1, 10],
        "random_sample": [1, 1],
        "none": [1, 10],
    }
    assert (
        "by policy      updates a step: auto 1 to 10, by_trajectory 1,"
        in turnwise("plan", EXAMPLES / SET_UPS["B"], more).stdout
    )
    assert "by policy" not in turnwise("plan", EXAMPLES / SET_UPS["B"]).stdout


@pytest.mark.parametrize("loss", ["tis", "topr", "cispo", "kimi15", "gspo", "gmpo", "sapo"])
def test_the_off_policy_example_is_planned_with_every_loss(loss: str) -> None:
    done = turnwise("plan", EXAMPLES / "off_policy.yaml", "--json", f"pg_variant={loss}")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["updates_per_step"] == [8, 8]
    assert not [w for w in values["warnings"] if "has no effect" in w]


@pytest.mark.parametrize("preset", ["deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3_cpuoffload"])
def test_every_preset_is_planned(preset: str) -> None:
    train = planned("A", f"actor_train.strategy_args.strategy_config=${{{preset}}}")["memory"][1]
    assert (train["weights"] == 0) == (preset == "deepspeed_zero3_cpuoffload")
    assert (train["cpu"] > 0) == (preset == "deepspeed_zero3_cpuoffload")


@pytest.mark.parametrize("strategy", ["deepspeed_train", "megatron_train", "vllm", "sglang"])
def test_an_option_that_the_engine_alone_knows_is_collected(strategy: str) -> None:
    role = "actor_infer" if strategy in ("vllm", "sglang") else "actor_train"
    more = f"{role}.strategy_args={{strategy_name: {strategy}, strategy_config: {{some_option_of_its_own: 3}}}}"
    config = load(EXAMPLES / SET_UPS["B"], [more], planning=True).config
    assert getattr(config, role).strategy_args.config.engine_args["some_option_of_its_own"] == 3
