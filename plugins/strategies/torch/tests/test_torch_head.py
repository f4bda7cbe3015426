"""The chunked head against one softmax over everything, and micro-batches against a loop over samples."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.data.rows import Rows
from turnwise_torch import head as head_module
from turnwise_torch import models
from turnwise_torch.head import chunked_log_probs, token_log_probs
from turnwise_torch.microbatch import Layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk", [0, 1, 4, 100])
def test_chunks_give_the_log_probs_entropies_and_gradients_of_the_whole(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(8, 30, bias=False, dtype=torch.float64)
    targets = torch.randint(0, 30, (13,))
    mix, blend = torch.randn(13, dtype=torch.float64), torch.randn(13, dtype=torch.float64)

    every = torch.log_softmax(hidden @ head.weight.T / 0.7, -1)
    expected, entropies = every[torch.arange(13), targets], -(every.exp() * every).sum(-1)
    wanted = torch.autograd.grad((mix * expected + blend * entropies).sum(), [hidden, head.weight])

    log_probs, entropy = chunked_log_probs(hidden, head, targets, 0.7, chunk=chunk, entropy=True, entropy_gradient=True)
    assert entropy is not None
    got = torch.autograd.grad((mix * log_probs + blend * entropy).sum(), [hidden, head.weight])
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, entropies, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [8, 64])
def test_several_chunks_keep_no_logits_for_the_backward_pass_and_one_chunk_does(chunk: int) -> None:
    hidden = torch.randn(64, 8, requires_grad=True)
    head = torch.nn.Linear(8, 1000, bias=False)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked_log_probs(
            hidden, head, torch.zeros(64, dtype=torch.int64), 1.0, chunk=chunk, entropy=True, entropy_gradient=True
        )
    assert (max(kept, default=0) >= 1000) == (chunk == 64)


def test_an_entropy_for_the_metric_alone_has_no_gradient() -> None:
    head = torch.nn.Linear(8, 30, bias=False)
    log_probs, entropy = chunked_log_probs(
        torch.randn(5, 8), head, torch.zeros(5, dtype=torch.int64), 1.0, entropy=True
    )
    assert log_probs.requires_grad
    assert entropy is not None
    assert not entropy.requires_grad


def test_half_precision_logits_are_normalised_in_fp32() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 500, bias=False, dtype=torch.bfloat16)
    hidden = 4 * torch.randn(6, 8, dtype=torch.bfloat16)
    targets = torch.arange(6)
    log_probs, _ = chunked_log_probs(hidden, head, targets, 0.5)
    expected = torch.log_softmax(head(hidden).double() / 0.5, -1)[torch.arange(6), targets]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("size", "budget"), [(1, None), (3, None), (100, None), (1, 30), (1, 1)])
def test_micro_batches_give_each_response_token_the_log_prob_of_its_own_sample(
    folder: Path, rows: Rows, size: int, budget: int | None
) -> None:
    model = models.load_causal_lm(folder, "fp64", "sdpa")
    expected = []
    with torch.no_grad():
        for start, end in zip(rows.offsets[:-1], rows.offsets[1:]):
            ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
            every = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
            expected += [float(every[t - 1, ids[t]]) for t in range(len(ids)) if rows.response_mask[start + t]]
        layout = Layout(rows)
        got = np.full(len(expected), np.nan)
        for samples in layout.cut(size, budget):
            batch = layout.micro_batch(samples, CPU)
            if budget is None:
                assert len(samples) <= size
            else:
                assert len(samples) == 1 or batch.input_ids.numel() <= budget
            got[batch.responses] = token_log_probs(model, batch, 0.7)[0].numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_tokens_after_the_last_response_are_not_computed() -> None:
    mask = np.array([0, 1, 1, 0, 0, 0, 0, 1, 0], bool)
    rows = Rows(np.arange(9, dtype=np.int32), np.array([0, 6, 9]), mask)
    layout = Layout(rows)
    batch = layout.micro_batch(np.array([1, 0]), CPU)
    assert batch.input_ids.tolist() == [[6, 0], [0, 1]]
    assert batch.predictors.tolist() == [0, 2, 3]
    assert batch.targets.tolist() == [7, 1, 2]
    assert batch.responses.tolist() == [2, 0, 1]


def test_samples_without_a_wanted_response_token_are_left_out() -> None:
    mask = np.array([0, 1, 0, 0, 0, 1], bool)
    layout = Layout(Rows(np.arange(6, dtype=np.int32), np.array([0, 2, 4, 6]), mask))
    assert [g.tolist() for g in layout.cut(8, None)] == [[0, 2]]
    assert [g.tolist() for g in layout.cut(8, None, wanted=np.array([False, True]))] == [[2]]
    assert list(layout.cut(8, None, wanted=np.array([False, False]))) == []


def test_cut_cross_entropy_is_asked_for_log_probs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU: a stand-in with its signature, by plain torch, shows what it is given and what is made of
    its answer."""
    asked: list[dict[str, Any]] = []

    def linear_cross_entropy(e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(options)
        return torch.nn.functional.cross_entropy(e.float() @ c.float().T, targets, reduction="none")

    stand_in = types.ModuleType("cut_cross_entropy")
    stand_in.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", stand_in)
    monkeypatch.setattr(head_module, "fused_head", lambda hidden, head, temperature: temperature == 1)
    hidden, targets = torch.randn(7, 8, dtype=torch.float64), torch.arange(7)
    head = torch.nn.Linear(8, 11, bias=False, dtype=torch.float64)
    fused, none = head_module.chunked_log_probs(hidden, head, targets, 1.0)
    chunked, entropy = head_module.chunked_log_probs(hidden, head, targets, 1.0, entropy=True)
    assert none is None
    assert entropy is not None
    assert asked == [{"reduction": "none", "filter_eps": None}]
    torch.testing.assert_close(fused.double(), chunked, atol=1e-6, rtol=0)
    head_module.chunked_log_probs(hidden, head, targets, 0.7)
    assert len(asked) == 1


def test_the_fused_head_is_for_16_bits_on_a_gpu() -> None:
    head = torch.nn.Linear(4, 5, bias=False)
    assert not head_module.fused_head(torch.zeros(2, 4), head, 1.0)
    assert not head_module.fused_head(torch.zeros(2, 4, dtype=torch.bfloat16), head, 1.0)
