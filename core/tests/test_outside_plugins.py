"""A loss and an estimator in one file outside the repository: their options, checks and health remarks work with no
line in the core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Loaded, load
from turnwise.errors import ConfigError
from turnwise.pipeline.health import unhealthy
from turnwise.plugins import registry
from turnwise.testing.kit import run_conformance

Toy = Callable[..., Path]

OUTSIDE = """
from attrs import frozen

import turnwise
from turnwise.contracts.estimator import EstimatorCapabilities
from turnwise.contracts.loss import LossCapabilities
from turnwise.data.normalise import RewardNormalization
from turnwise.errors import Problem
from turnwise.testing.fakes import FakeEstimator, FakeLoss


@frozen
class FenceConfig:
    capabilities = LossCapabilities(clips=True, own_ratio=True)
    fence_height: float = 0.5
    fence_gate: bool = False

    def check(self, run):
        if self.fence_gate and run.ppo_epochs > 1:
            yield Problem("fence_gate", "true with several epochs. Fix: ppo_epochs: 1")
        if self.fence_height > 1:
            yield Problem("fence_height", "has no effect above 1", warning=True)
        if run.sequence_length < 32:
            yield Problem("$.sequence_length", "the fence needs 32. Fix: sequence_length: 32")


class Fence(FakeLoss):
    pass


@frozen
class LadderConfig:
    ladder_steps: int = 3


class Ladder(FakeEstimator):
    capabilities = EstimatorCapabilities(compares_in_groups=True)
    normalization = RewardNormalization(grouping="traj_group_id", method="mean")


@turnwise.hookimpl
def policy_losses():
    return [turnwise.Implementation("fence", Fence, config=FenceConfig)]


@turnwise.hookimpl
def advantage_estimators():
    return [turnwise.Implementation("ladder", Ladder, config=LadderConfig)]
"""


@pytest.fixture
def outside(toy: Toy, tmp_path: Path) -> Callable[..., Loaded]:
    """`outside(*overrides, **keys)`: a run with the plugin's loss and estimator, loaded."""
    (tmp_path / "outside.py").write_text(OUTSIDE, encoding="utf-8")

    def run(*overrides: str, **keys: Any) -> Loaded:
        plugins = ["turnwise.testing.plugin", "./players.py", "./outside.py"]
        return load(toy(**{"plugins": plugins, "pg_variant": "fence", "adv_estimator": "ladder", **keys}), overrides)

    return run


def test_options_stand_at_the_top_level_or_with_the_choice(outside: Callable[..., Loaded]) -> None:
    config = outside(fence_height=0.7, adv_estimator={"use": "ladder", "ladder_steps": 5}).config
    assert (config.pg_variant.config.fence_height, config.adv_estimator.config.ladder_steps) == (0.7, 5)


def test_options_of_another_choice_are_a_warning_and_misspelt_ones_an_error(outside: Callable[..., Loaded]) -> None:
    (warning,) = [line for line in outside(fence_height=0.7, pg_variant="fake").warnings if "fence_height" in line]
    assert "fence_height has no effect with pg_variant 'fake_loss'" in warning
    with pytest.raises(ConfigError, match="Did you mean 'fence_height'"):
        outside(fence_heigth=0.7, pg_variant="fake")


def test_checks_are_reported_at_the_place_of_the_option(outside: Callable[..., Loaded]) -> None:
    with pytest.raises(ConfigError) as caught:
        outside(fence_gate=True, ppo_epochs=2, sequence_length=16)
    assert any("$.fence_gate: true with several epochs. Fix: ppo_epochs: 1" in line for line in caught.value.problems)
    assert any("$.sequence_length: the fence needs 32" in line for line in caught.value.problems)
    assert any("$.fence_height: has no effect above 1" in line for line in outside(fence_height=2).warnings)


def test_capabilities_decide_warnings(outside: Callable[..., Loaded]) -> None:
    assert any("pg_variant 'fence' does not use the ratio" in line for line in outside(ratio_type="segment").warnings)
    alone = {"num_env_groups": 4, "group_size": 1, "tags": ["Toy"]}
    assert any(
        "group_size 1 leaves 'ladder' no other trajectory" in line for line in outside(train_env_manager=alone).warnings
    )


def test_health_remarks_follow_what_they_declare(outside: Callable[..., Loaded]) -> None:
    values = {"policy/clip_frac": 0.9, "critic/reward/mean": 3.0}
    remarks = unhealthy(values, outside().config)
    assert [remark.split(" = ")[0] for remark in remarks] == ["policy/clip_frac", "critic/reward/mean"]
    assert unhealthy(values, outside(pg_variant="fake", adv_estimator="fake").config) == []


def test_they_keep_their_contracts(outside: Callable[..., Loaded]) -> None:
    outside()
    assert registry().find("policy_loss", "fence").owner == "./outside.py"
    assert run_conformance("ladder", "advantage_estimator", strict=True) == 0
