"""Where old log-probs come from: every branch of the choice, and what the column holds in each."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from turnwise import Implementation
from turnwise.config.schema import Choice, ModelArgs, Role
from turnwise.contracts.estimator import EstimatorCapabilities
from turnwise.data.batch import Batch
from turnwise.data.rows import Rows
from turnwise.errors import ConfigError
from turnwise.pipeline.old_logprobs import OldLogProbs
from turnwise.testing.registered import registered
from turnwise.testing.runs import one_step
from turnwise.testing.synthetic import batch_of, row_per_turn, trajectories


def chooser(
    mode: str = "auto", shared: bool = True, beta: float = 0.0, dtype: str = "fp32", estimator: str = "grpo"
) -> OldLogProbs:
    config = one_step(
        rollout_batch_size=6,
        recompute_old_logprobs=mode,  # type: ignore[arg-type]
        init_kl_coef=beta,
        adv_estimator=Choice(estimator),
        actor_train=Role(model_args=ModelArgs(dtype=dtype)),  # type: ignore[arg-type]
    )
    return OldLogProbs(config, shared=shared)


def sampled(known: bool = True, version: int = 3) -> Batch:
    """A batch sampled by `version`; without `known`, one of its tokens has no log-prob from the sampler."""
    batch = batch_of(trajectories(2, 3), row_per_turn)
    versions = np.where(batch.tokens["response_mask"], version, -1).astype(np.int32)
    infer = batch.tokens["infer_log_probs"].copy()
    if not known:
        infer[batch.sampled[4]] = np.nan
    return batch.with_tokens(versions=versions, infer_log_probs=infer)


class Actor:
    """Counts its calls; the log-prob of the r-th sampled token, in row order, is −r."""

    def __init__(self) -> None:
        self.asked: list[Rows] = []

    async def logprobs(self, rows: Rows) -> np.ndarray:
        self.asked.append(rows)
        return -np.arange(int(rows.response_mask.sum()), dtype=np.float32)


@pytest.mark.parametrize("mode", ["auto", "true", "false"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_choice_follows_from_the_settings_and_the_data(
    mode: str, shared: bool, known: bool, version: int, updates: int, beta: float
) -> None:
    batch, here = sampled(known, version), chooser(mode, shared, beta)
    if mode == "false" and not known:
        with pytest.raises(
            ConfigError, match=r"^recompute_old_logprobs: false needs the sampler's log-probs, and it gave none"
        ):
            here.choose(batch, updates, 3)
        return
    own = shared and known and version == 3  # the sampler's are the trainer's own
    expected = {"true": "recompute", "false": "sampler"}.get(mode)
    if expected is None:
        expected = "sampler" if own else "detached" if updates == 1 and beta == 0 else "recompute"
    assert here.choose(batch, updates, 3) == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_16_bits_a_samplers_log_probs_are_not_the_trainers_own(dtype: str) -> None:
    """A cache rounds otherwise than a pass over the whole row, though the weights are the same."""
    assert chooser(dtype=dtype).choose(sampled(), 1, 3) == "detached"
    assert chooser(dtype=dtype).choose(sampled(), 2, 3) == "recompute"
    assert chooser(mode="false", dtype=dtype).choose(sampled(), 2, 3) == "sampler"


@pytest.mark.parametrize(
    ("column", "expected"), [("old_log_probs", "recompute"), ("infer_log_probs", "detached"), ("values", "detached")]
)
def test_an_estimator_that_reads_old_log_probs_gets_no_gap_in_their_place(column: str, expected: str) -> None:
    class Reads:
        capabilities = EstimatorCapabilities(needs=frozenset({column}))

    with registered(("advantage_estimator", Implementation("reads", Reads))):
        here = chooser(shared=False, estimator="reads")
        assert here.choose(sampled(), 1, 3) == expected
        if column == "infer_log_probs":
            with pytest.raises(ConfigError, match=r"^adv_estimator: reads needs the sampler's log-probs, and it gave"):
                here.choose(sampled(known=False), 1, 3)


def test_one_stale_token_is_enough_to_recompute() -> None:
    batch = sampled()
    versions = batch.tokens["versions"].copy()
    versions[batch.sampled[0]] = 2
    assert chooser().choose(batch.with_tokens(versions=versions), 2, 3) == "recompute"
    assert chooser().choose(batch, 2, 3) == "sampler"


def added(here: OldLogProbs, batch: Batch, actor: Any, updates: int = 2) -> np.ndarray:
    column = asyncio.run(here.add(batch, actor, updates=updates, version=3)).tokens["old_log_probs"]
    assert column.dtype == np.float32
    assert not column[~batch.tokens["response_mask"]].any()
    return column[batch.tokens["response_mask"]]


def test_the_samplers_are_copied_without_a_pass() -> None:
    batch, actor = sampled(), Actor()
    np.testing.assert_array_equal(
        added(chooser(), batch, actor), batch.tokens["infer_log_probs"][batch.tokens["response_mask"]]
    )
    assert actor.asked == []


def test_detached_ones_are_nan_without_a_pass() -> None:
    batch, actor = sampled(known=False), Actor()
    assert np.isnan(added(chooser(), batch, actor, updates=1)).all()
    assert actor.asked == []


def test_recomputed_ones_stand_on_their_tokens_after_one_pass_over_all_rows() -> None:
    batch, actor = sampled(), Actor()
    got = added(chooser("true"), batch, actor)
    np.testing.assert_array_equal(got, -np.arange(len(got)))
    assert [len(rows) for rows in actor.asked] == [len(batch.samples)]


@pytest.mark.parametrize("mode", ["auto", "true", "false"])
def test_a_batch_without_sampled_tokens_needs_no_pass(mode: str) -> None:
    batch, actor = batch_of([t for t in trajectories(2, 3) if not t.turns]), Actor()
    assert len(added(chooser(mode, shared=False, beta=0.1), batch, actor)) == 0
    assert actor.asked == []
