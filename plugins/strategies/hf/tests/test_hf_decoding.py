"""Cached, deduplicated, ragged decoding gives what the model's own full forward pass gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.trajectory import int32
from turnwise.errors import EngineError
from turnwise_hf import decoding
from turnwise_hf.decoding import Row, Sampled, decode, prefill, sample_batch


def load(folder: Path, attention: str = "sdpa") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


def plain_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """[n, vocabulary]: one row, one full forward pass, no cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def prompts(
    count: int, seed: int = 0, shared: int = 0, shortest: int = 1, longest: int = 20, vocabulary: int = 40
) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    start = generator.integers(0, vocabulary, shared)
    return [
        int32([*start, *generator.integers(0, vocabulary, generator.integers(shortest, longest + 1))])
        for _ in range(count)
    ]


def sample(
    model: Any, rows: Sequence[Row], stop_ids: Sequence[int] = (), aborted: set[int] | None = None
) -> list[Sampled]:
    with torch.no_grad():
        return sample_batch(rows, lambda: (model, 3), stop_ids, aborted or set())


def rows_of(ids: Sequence[np.ndarray], limit: int = 6, **args: Any) -> list[Row]:
    return [Row(prompt, limit, 100 + index, GeneratingArgs(**args)) for index, prompt in enumerate(ids)]


def watched_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the ids of all forward passes to come."""
    widths: list[tuple[int, ...]] = []
    # How wide its passes are is a matter of cost and shows in no result.
    forward = decoding._forward

    def watched(model: Any, cache: Any, ids: torch.Tensor, place: Any) -> torch.Tensor:
        widths.append(tuple(ids.shape))
        return forward(model, cache, ids, place)

    monkeypatch.setattr(decoding, "_forward", watched)
    return widths


@pytest.mark.parametrize(
    ("architecture", "attention"), [("qwen2", "sdpa"), ("qwen3", "sdpa"), ("llama", "sdpa"), ("qwen2", "eager")]
)
@pytest.mark.parametrize("shared", [0, 11])
def test_ragged_prefill_and_decoding_equal_the_full_forward_pass(
    make: Callable[..., Path], architecture: str, attention: str, shared: int
) -> None:
    folder = make(architecture=architecture, tie_word_embeddings=architecture != "llama")
    model = load(folder, attention)
    ids = prompts(7, shared=shared)
    with torch.no_grad():
        logits, order, cache = prefill(model, ids, reserved=1)
        sequences = [list(ids[index]) for index in order]
        for step in range(40):  # beyond the reserved positions: the cache grows
            for row, sequence in zip(logits.numpy(), sequences):
                np.testing.assert_allclose(row, plain_logits(model, sequence)[-1], atol=2e-5)
            tokens = int32([(7 * step + 3 * row) % 40 for row in range(len(ids))])
            logits = decode(model, cache, tokens, np.array([len(sequence) for sequence in sequences]))
            sequences = [[*sequence, token] for sequence, token in zip(sequences, tokens.tolist())]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_a_plain_forward_pass(model: Any, temperature: float) -> None:
    rows = rows_of(prompts(9), temperature=temperature, top_k=20, top_p=0.9)
    for row, result in zip(rows, sample(model, rows)):
        logits = plain_logits(model, [*row.ids, *result.ids]).astype(np.float64)[len(row.ids) - 1 : -1] / temperature
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(result.logprobs, expected[np.arange(len(result.ids)), result.ids], atol=1e-5)
        assert (result.ids.dtype, result.logprobs.dtype, result.versions.dtype) == (np.int32, np.float32, np.int32)
        assert result.versions.tolist() == [3] * len(result.ids)


def test_greedy_tokens_are_the_argmax_of_the_full_forward_pass(model: Any) -> None:
    rows = rows_of(prompts(6), temperature=0)
    for row, result in zip(rows, sample(model, rows)):
        logits = plain_logits(model, [*row.ids, *result.ids])[len(row.ids) - 1 : -1]
        assert result.ids.tolist() == logits.argmax(-1).tolist()


def test_tokens_do_not_depend_on_the_rest_of_the_batch(model: Any) -> None:
    rows = rows_of([*prompts(20, shared=9), *prompts(20, seed=1)], limit=8)
    whole = sample(model, rows, stop_ids=[5, 6, 7, 8])
    assert len({len(result.ids) for result in whole}) > 2
    for index, row in enumerate(rows):
        (alone,) = sample(model, [row], stop_ids=[5, 6, 7, 8])
        assert alone.ids.tolist() == whole[index].ids.tolist()
        np.testing.assert_allclose(alone.logprobs, whole[index].logprobs, atol=1e-5)
        assert alone.finish == whole[index].finish
    reversed_ = sample(model, rows[::-1], stop_ids=[5, 6, 7, 8])[::-1]
    assert [result.ids.tolist() for result in reversed_] == [result.ids.tolist() for result in whole]


def test_equal_prompts_are_computed_once_and_sampled_by_their_own_seeds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [prompts(3, shortest=10)[index] for index in (0, 1, 0, 2, 1, 0)]
    widths = watched_passes(monkeypatch)
    results = sample(model, rows_of(ids, limit=2))
    assert widths == [(3, max(map(len, ids))), (6, 1)]
    assert results[0].ids.tolist() != results[2].ids.tolist() or results[0].ids.tolist() != results[5].ids.tolist()
    again = sample(model, [Row(ids[0], 2, 100, GeneratingArgs()), Row(ids[0], 2, 100, GeneratingArgs())])
    assert again[0].ids.tolist() == again[1].ids.tolist() == results[0].ids.tolist()


def test_a_common_beginning_is_computed_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts(5, shared=12, shortest=3, longest=3)
    widths = watched_passes(monkeypatch)
    with torch.no_grad():
        logits, order, _ = prefill(model, ids)
    assert widths == [(1, 12), (5, 3)]
    for row, index in zip(logits.numpy(), order):
        np.testing.assert_allclose(row, plain_logits(model, ids[index])[-1], atol=1e-5)


def test_a_prompt_that_begins_all_others_keeps_a_token_of_its_own(model: Any) -> None:
    long = prompts(1, shortest=20)[0]
    ids = [long, long[:12], long[:15]]
    with torch.no_grad():
        logits, order, _ = prefill(model, ids)
    assert order.tolist() == [1, 2, 0]
    for row, index in zip(logits.numpy(), order):
        np.testing.assert_allclose(row, plain_logits(model, ids[index])[-1], atol=1e-5)


def test_long_batches_are_read_in_several_passes_with_the_same_result(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(prompts(12))
    whole = sample(model, rows)
    monkeypatch.setattr(decoding, "_PREFILL_TOKENS", 30)
    assert [result.ids.tolist() for result in sample(model, rows)] == [result.ids.tolist() for result in whole]
    # As above: how rows are put together shows in no result.
    assert decoding._chunks(np.array([4, 10, 10, 10, 50, 60])) == [(0, 3), (3, 4), (4, 5), (5, 6)]


def test_stop_ids_end_a_row_with_the_stop_token_in_it_and_limits_are_per_row(model: Any) -> None:
    free = sample(model, rows_of(prompts(5), limit=6))
    stop = int(free[0].ids[2])
    first = free[0].ids.tolist().index(stop)
    limited = [Row(row.ids, 1 + index, row.seed, row.args) for index, row in enumerate(rows_of(prompts(5)))]
    for index, (result, before) in enumerate(zip(sample(model, limited), free)):
        assert result.ids.tolist() == before.ids.tolist()[: 1 + index]
        assert result.finish == "length"
    stopped = sample(model, rows_of(prompts(5), limit=6), stop_ids=[stop])[0]
    assert stopped.ids.tolist() == free[0].ids.tolist()[: first + 1]
    assert stopped.finish == "stop"


def test_a_watched_row_ends_where_its_text_says_so(model: Any) -> None:
    free = sample(model, rows_of(prompts(4), limit=6))
    rows = rows_of(prompts(4), limit=6)
    rows[1] = Row(rows[1].ids, 6, rows[1].seed, rows[1].args, stopped=lambda ids: len(ids) == 3)
    results = sample(model, rows)
    assert [len(result.ids) for result in results] == [6, 3, 6, 6]
    assert [result.finish for result in results] == ["length", "stop", "length", "length"]
    assert results[2].ids.tolist() == free[2].ids.tolist()


def test_an_aborted_row_leaves_and_the_others_are_as_before(model: Any) -> None:
    rows = rows_of(prompts(4), limit=6)
    free = sample(model, rows)
    results = sample(model, rows, aborted={0, 2})
    assert [len(result.ids) for result in results] == [1, 6, 1, 6]
    assert [result.finish for result in results] == ["abort", "length", "abort", "length"]
    assert results[3].ids.tolist() == free[3].ids.tolist()


def test_new_weights_in_the_middle_sample_the_next_tokens_as_if_they_had_read_everything(
    make: Callable[..., Path], model: Any
) -> None:
    other = load(make(seed=9))
    rows = rows_of(prompts(6), limit=6)
    calls = 0

    def gate() -> tuple[Any, int]:
        nonlocal calls
        calls += 1
        return (model, 4) if calls <= 3 else (other, 5)

    with torch.no_grad():
        results = sample_batch(rows, gate, [7])
    assert any(len(result.ids) == 6 for result in results)
    for row, result in zip(rows, results):
        assert result.versions.tolist() == [4, 4, 4, 5, 5, 5][: len(result.ids)]
        for place, token in enumerate(result.ids):
            logits = plain_logits(model if place < 3 else other, [*row.ids, *result.ids[:place]])[-1].astype(np.float64)
            assert result.logprobs[place] == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-5)


def test_logits_that_are_not_finite_are_refused(make: Callable[..., Path]) -> None:
    broken = load(make(seed=11))
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="the model's logits are not finite"):
        sample(broken, rows_of(prompts(3)))
