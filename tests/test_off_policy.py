"""The off-policy losses, the train/infer correction and the KL terms in whole runs, from the YAML to the metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "off_policy.yaml"
SHORT = ("max_steps=2", "eval_steps=0", "save_steps=0", "baselines=[]", "kl_loss_coef=0")
LOSSES = ("tis", "topr", "cispo", "kimi15", "gspo", "gmpo", "sapo", "dppo")
CORRECTED = (
    "train_infer_correction={is_weight: {enabled: true, upper_bound: 1.0}, filters: [{agg_type: sequence,"
    " ratio_enabled: true}]}"
)


@pytest.mark.parametrize("override", ["ppo_epochs=2", *(f"pg_variant={name}" for name in LOSSES), CORRECTED])
def test_the_example_is_planned_without_a_warning_about_a_loss(lake: Any, override: str) -> None:
    result = lake.command("plan", str(EXAMPLE), override)
    assert result.exit_code == 0, result.output
    assert "updates        8 a step" in result.output
    assert "has no effect" not in result.output


def test_the_example_can_train_here(lake: Any) -> None:
    result = lake.command("check", str(EXAMPLE))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("loss", LOSSES)
def test_every_off_policy_loss_trains(lake: Any, loss: str) -> None:
    lake.train(*SHORT, f"pg_variant={loss}", "ppo_epochs=2")
    lines = lake.metrics()
    assert [line["step"] for line in lines][:2] == [0, 1]
    for line in lines[:2]:
        assert line["policy/updates"] == 4
        assert line["policy/grad_norm"] > 0
        assert math.isfinite(line["policy/loss"])
        assert line["policy/approx_kl"] > 0  # the second epoch has moved away from the first


# ---------------------------------------------------------------- train/infer correction


def test_in_one_process_sampler_and_trainer_differ_by_rounding_alone(lake: Any) -> None:
    lake.train(*SHORT, CORRECTED, "recompute_old_logprobs=true")
    for line in lake.metrics()[:2]:
        assert line["correction/ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert line["correction/prob_diff/max"] < 1e-4
        assert line["correction/weight/mean"] == pytest.approx(1, abs=1e-4)
        assert line["correction/filtered_frac"] == 0
        assert line["policy/grad_norm"] > 0


def test_tokens_that_a_filter_drops_do_not_train(lake: Any) -> None:
    dropped = "train_infer_correction={filters: [{ratio_enabled: true, ratio_low: 1.1, ratio_high: 2}]}"
    lake.train(*SHORT, dropped, "recompute_old_logprobs=true")
    for line in lake.metrics()[:2]:
        assert line["correction/filtered_frac"] == 1
        assert line["policy/grad_norm"] == 0


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_correction_of_shared_weights_without_a_pass_is_refused_before_the_start(lake: Any, command: str) -> None:
    result = lake.command(command, "run.yaml", CORRECTED)
    assert result.exit_code == 2
    assert (
        "train_infer_correction compares old log-probs with the sampler's, but here they are the sampler's"
        in result.output
    )
    assert not (lake.folder / "out").exists()


# ---------------------------------------------------------------- KL


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_kl_in_reward_and_loss_against_a_reference_with_the_adaptive_coefficient(lake: Any, kind: str) -> None:
    """Two steps of 16 trajectories; at the first the policy is the reference, so the coefficient falls by as much as it
    may."""
    estimator = {"k1": "reinforce", "abs": "grpo", "k2": "rloo"}.get(kind, "reinforce_plus_plus_baseline")
    lake.train(
        "max_steps=3", "eval_steps=0", "save_steps=0", "baselines=[]", f"adv_estimator={estimator}", f"kl_penalty={kind}", f"kl_loss_type={kind}",
        "init_kl_coef=0.2", "kl_loss_coef=0.05", "target_kl=0.01", "kl_horizon=64", "reference={model_args: {dtype: fp32}}",
    )  # fmt: skip
    first, second, third = lake.metrics(timed=True)[:3]
    assert abs(first["critic/kl"]) < 1e-6
    assert abs(second["critic/kl"]) > 1e-6
    assert first["critic/kl_coef"] == 0.2
    assert second["critic/kl_coef"] == pytest.approx(0.2 * (1 - 0.2 * 16 / 64))
    moved = min(max(second["critic/kl"] / 0.01 - 1, -0.2), 0.2)
    assert third["critic/kl_coef"] == pytest.approx(second["critic/kl_coef"] * (1 + moved * 16 / 64))
    assert second["critic/kl_penalty/mean"] != 0
    for line in (first, second, third):
        assert {"time/reference", "policy/kl"} <= line.keys()
        assert math.isfinite(line["policy/loss"])


def test_no_reference_is_run_where_no_coefficient_is_positive(lake: Any) -> None:
    lake.train(*SHORT)
    assert all("policy/kl" not in line and "critic/kl" not in line for line in lake.metrics())
    assert all("time/reference" not in line for line in lake.metrics(timed=True))
