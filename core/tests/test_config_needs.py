"""What the advantage estimator needs: token columns that something in the run makes before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise import Implementation
from turnwise.config import Loaded, load
from turnwise.contracts.env_manager import ManagerCapabilities
from turnwise.contracts.estimator import EstimatorCapabilities
from turnwise.errors import ConfigError
from turnwise.plugins import Entry, Registry

COLUMNS = ("values", "ref_log_probs", "kl_penalty", "returns", "cost", "old_log_probs", "infer_log_probs")


class Costed:
    capabilities = ManagerCapabilities(columns=frozenset({"cost"}))


@pytest.fixture
def needing(
    fake_registry: Registry, base_yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Loaded]:
    """`needing(column, *overrides)`: load a run whose estimator needs it."""
    monkeypatch.chdir(tmp_path)
    made = [
        Implementation(f"of_{name}", type(name, (), {"capabilities": EstimatorCapabilities(needs=frozenset({name}))}))
        for name in COLUMNS
    ]
    records = [("advantage_estimator", one) for one in made] + [("env_manager", Implementation("costed", Costed))]
    known = Registry(
        entries=[
            *fake_registry.entries(),
            *(Entry(kind, record, "more", "made-for-tests", "1.0") for kind, record in records),
        ]
    )

    def run(column: str, *overrides: str) -> Loaded:
        Path("run.yaml").write_text(base_yaml, encoding="utf-8")
        return load("run.yaml", [f"adv_estimator=of_{column}", *overrides], registry=known)

    return run


@pytest.mark.parametrize(
    ("column", "line", "overrides"),
    [
        (
            "values",
            "needs the values of a critic. Fix: critic: {strategy_args: …, training_args: …}, or another estimator",
            ["critic={training_args: {per_device_train_batch_size: 16}}"],
        ),
        (
            "ref_log_probs",
            "needs the log-probs of a reference. Fix: init_kl_coef or kl_loss_coef above 0, or another estimator",
            ["kl_loss_coef=0.1"],
        ),
        (
            "kl_penalty",
            "needs the KL penalty of each token. Fix: init_kl_coef above 0, and kl_in_score: false, or another estimator",
            ["init_kl_coef=0.1"],
        ),
        (
            "cost",
            "needs the token column 'cost', which no environment manager of the training tags writes (they write none)."
            " Fix: an env_manager that declares it (ManagerCapabilities.columns), or another estimator",
            ["custom_envs.Lake.env_manager=costed"],
        ),
    ],
)
def test_a_column_that_nothing_makes_is_refused_with_what_would_make_it(
    needing: Callable[..., Loaded], column: str, line: str, overrides: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        needing(column)
    assert [one.split("$.adv_estimator: ")[1] for one in caught.value.problems] == [
        f"adv_estimator 'of_{column}' {line}"
    ]
    assert needing(column, *overrides).config.adv_estimator.name == f"of_{column}"


def test_a_penalty_that_the_scores_have_is_on_no_token(needing: Callable[..., Loaded]) -> None:
    with pytest.raises(ConfigError, match="needs the KL penalty of each token"):
        needing("kl_penalty", "init_kl_coef=0.1", "kl_in_score=true")


def test_a_column_that_the_estimator_itself_makes_is_a_broken_plugin(needing: Callable[..., Loaded]) -> None:
    with pytest.raises(ConfigError, match=r"needs the column 'returns', which estimators make\. Fix: repair"):
        needing("returns")


@pytest.mark.parametrize("column", ["old_log_probs", "infer_log_probs"])
def test_a_column_of_every_batch_asks_nothing(needing: Callable[..., Loaded], column: str) -> None:
    assert needing(column).warnings == needing("ref_log_probs", "kl_loss_coef=0.1").warnings


def test_a_manager_of_an_environment_that_does_not_train_brings_no_column(needing: Callable[..., Loaded]) -> None:
    with pytest.raises(ConfigError, match="they write none"):
        needing("cost", "custom_envs.Other={env_type: lake, env_manager: costed}")
