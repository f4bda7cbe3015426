"""What every strategy keeps: log-probs as they are defined, updates that learn, the same state after save and load,
weights on offer."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.train import Lora, StrategyCapabilities, TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.errors import CheckpointError, Problem
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import training_rows

KIND = "train_strategy"
# Not 1, or a strategy that forgets to divide would not be noticed.
TEMPERATURE = 0.7


def build(implementation: Subject, **changes: Any) -> Any:
    """The strategy with the supplied context and `changes` of it."""
    context: TrainContext = implementation.need("context")
    return implementation.build(evolve(context, temperature=TEMPERATURE, **changes))


def rows(implementation: Subject) -> Rows:
    """Rows of valid ids."""
    return training_rows(vocabulary=implementation.supplied.get("vocab_size", 64))


def update(implementation: Subject, lr: float | None = None) -> Update:
    """An update of these rows, by the supplied learning rate."""
    return Update(rows(implementation), implementation.supplied.get("lr", 1e-3) if lr is None else lr)


def test_what_is_wrong_is_returned_as_problems(implementation: Subject) -> None:
    """By `check`, before anything is placed."""
    found = implementation.entry.target().check(implementation.config, implementation.need("context"))
    assert all(isinstance(problem, Problem) for problem in found), "check must return turnwise.errors.Problem records."


def test_log_probs_are_those_of_the_reference(implementation: Subject) -> None:
    """At the temperature that was sampled with."""
    reference = implementation.need("reference_logprobs")
    strategy, given = build(implementation), rows(implementation)
    got = strategy.logprobs(given)
    assert got.shape == (int(given.response_mask.sum()),)
    assert got.dtype == np.float32
    expected = []
    for s in range(len(given)):
        row = slice(given.offsets[s], given.offsets[s + 1])
        ids, mask = given.input_ids[row], given.response_mask[row]
        # A reference may give a number for the first token, too, which nothing precedes.
        expected.append(reference(ids, TEMPERATURE)[-(len(ids) - 1) :][mask[1:]])
    message = f"log-probs are not of log_softmax(logits / {TEMPERATURE}) over the whole vocabulary."
    np.testing.assert_allclose(
        got, np.concatenate(expected), atol=implementation.supplied.get("atol", 1e-3), rtol=0, err_msg=message
    )
    strategy.close()


def test_an_update_raises_what_has_a_positive_advantage(implementation: Subject) -> None:
    """With a finite loss, a gradient, and finite sums."""
    strategy = build(implementation)
    before = strategy.logprobs(rows(implementation))
    result = strategy.update(update(implementation))
    after = strategy.logprobs(rows(implementation))
    assert np.isfinite(result.loss)
    assert result.grad_norm > 0
    assert all(np.isfinite(pair).all() and pair[1] >= 0 for pair in result.sums.values())
    assert after.mean() > before.mean(), "the log-probs of tokens with advantage 1 did not rise."
    strategy.close()


def test_an_update_that_is_not_finite_is_skipped(implementation: Subject) -> None:
    """The weights stay, the sums are finite, and the next update is made."""
    strategy, given = build(implementation), update(implementation)
    before = strategy.logprobs(given.rows)
    columns = {**given.rows.columns, "advantages": np.full(len(before), np.nan)}
    result = strategy.update(evolve(given, rows=evolve(given.rows, columns=columns)))
    assert result.skipped, (
        "an update of a loss that is not finite was not skipped. Fix: make no step, return UpdateResult(…,"
        " skipped=True)."
    )
    assert all(np.isfinite(pair).all() for pair in result.sums.values()), (
        "a skipped update reports sums that are not finite. Fix: leave them out."
    )
    np.testing.assert_array_equal(strategy.logprobs(given.rows), before, "a skipped update moved the weights.")
    assert not strategy.update(given).skipped, "after a skipped update the next one was skipped, too."
    strategy.close()


def test_rate_zero_changes_nothing(implementation: Subject) -> None:
    """Neither the gradient nor a weight decay."""
    strategy = build(implementation)
    before = strategy.logprobs(rows(implementation))
    strategy.update(update(implementation, lr=0.0))
    np.testing.assert_array_equal(
        strategy.logprobs(rows(implementation)), before, "an update with learning rate 0 moved the weights."
    )
    strategy.close()


def test_micro_batches_do_not_change_the_gradient(implementation: Subject) -> None:
    """The objective is a sum over the whole update."""
    results = []
    # A row a pass, and all rows in one.
    for size in (1, 64):
        strategy = build(implementation, per_device_train_batch_size=size)
        results.append(strategy.update(update(implementation)))
        strategy.close()
    small, large = results
    message = "the gradient depends on the micro-batch size. Fix: sum coef·loss over micro-batches, divide by nothing."
    np.testing.assert_allclose(small.grad_norm, large.grad_norm, rtol=1e-3, err_msg=message)
    np.testing.assert_allclose(small.loss, large.loss, rtol=1e-3, atol=1e-6, err_msg=message)


def test_load_undoes_what_came_after_save(implementation: Subject, tmp_path: Path) -> None:
    """Weights and the optimizer's state."""
    strategy, given = build(implementation), rows(implementation)
    strategy.update(update(implementation))
    (tmp_path / "state").mkdir()
    strategy.save(tmp_path / "state")
    saved = strategy.logprobs(given)
    strategy.update(update(implementation))
    further = strategy.logprobs(given)
    other = build(implementation)
    # Into the one that went on, and into a new one as after a restart.
    for loaded in (strategy, other):
        loaded.load(tmp_path / "state")
        np.testing.assert_array_equal(loaded.logprobs(given), saved, "the weights after load are not those of save.")
        loaded.update(update(implementation))
        np.testing.assert_array_equal(
            loaded.logprobs(given), further, "the update after load differs: the optimizer's state was not kept."
        )
        loaded.close()


def test_a_folder_without_a_state_is_refused(implementation: Subject, tmp_path: Path) -> None:
    """By CheckpointError."""
    strategy = build(implementation)
    with pytest.raises(CheckpointError):
        strategy.load(tmp_path)
    strategy.close()


def test_offers_name_their_transport_and_version_and_travel(implementation: Subject) -> None:
    """All but a shared one pickle."""
    strategy = build(implementation)
    for transport in implementation.transports(implementation.need("context")):
        offer = strategy.offer(transport, 7)
        assert (offer.transport, offer.version) == (transport, 7)
        if transport != "shared":
            pickle.loads(pickle.dumps(offer))
    strategy.close()


def test_adapters_travel_alone_where_it_says_so(implementation: Subject) -> None:
    """With the configuration that PEFT reads."""
    if not implementation.capabilities(StrategyCapabilities).adapters:
        return  # it sends whole weights
    pytest.importorskip("peft", reason="adapters need PEFT: pip install 'turnwise-torch[lora]'")
    lora = Lora(rank=2, alpha=4, sync="adapter")
    strategy = build(implementation, lora=lora)
    for transport in set(implementation.transports(evolve(implementation.need("context"), lora=lora))) - {"shared"}:
        offer = strategy.offer(transport, 7)
        assert offer.adapter is not None, f"the offer by {transport!r} does not say that it brings adapters alone."
        assert (offer.adapter["r"], offer.adapter["lora_alpha"]) == (2, 4)
        assert json.loads(json.dumps(offer.adapter)) == offer.adapter, (
            "adapter_config.json could not hold the offer's configuration."
        )
        if transport == "safetensors":
            assert {"adapter_config.json", "adapter_model.safetensors"} <= {
                file.name for file in Path(offer.payload["folder"]).iterdir()
            }
    strategy.close()


def test_export_writes_a_model_folder(implementation: Subject, tmp_path: Path) -> None:
    """From which another strategy, or an engine, begins."""
    strategy = build(implementation)
    (tmp_path / "export").mkdir()
    strategy.export(tmp_path / "export")
    assert (tmp_path / "export" / "config.json").is_file(), (
        "the export has no config.json; it must be a folder in Hugging Face layout."
    )
    strategy.close()


def test_a_frozen_strategy_gives_the_same_log_probs(implementation: Subject) -> None:
    """As a reference, which is never updated."""
    trained, frozen = build(implementation), build(implementation, trainable=False, role="reference", objective=None)
    np.testing.assert_allclose(
        frozen.logprobs(rows(implementation)), trained.logprobs(rows(implementation)), atol=1e-5, rtol=0
    )
    trained.close()
    frozen.close()


def test_it_offloads_onloads_and_closes_twice(implementation: Subject) -> None:
    """And is the same afterwards."""
    strategy = build(implementation)
    before = strategy.logprobs(rows(implementation))
    strategy.offload()
    strategy.onload()
    np.testing.assert_array_equal(strategy.logprobs(rows(implementation)), before)
    strategy.close()
    strategy.close()
