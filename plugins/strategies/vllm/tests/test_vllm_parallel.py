"""Several processes hold the model: log-probs stay those of one plain forward pass, before and after an update; and
weights are rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm_cases import CLOSE, IN_PROCESS, across

from turnwise.contracts.train import Lora

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400), *IN_PROCESS]
SIZES = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"engine_args": {"data_parallel_size": 2}},
}


def check(lab: Any, model: Any) -> None:
    requests = [lab.request(seed, length=5 + seed, prompt=seed, temperature=t) for t in (0.7, 1.0) for seed in range(4)]
    for request, answer in zip(requests, lab.ask(*requests), strict=True):
        assert set(answer.versions.tolist()) == {lab.version}
        assert lab.off(model, request, answer) < CLOSE


@pytest.mark.parametrize("sizes", SIZES)
def test_every_process_serves_the_folder_and_then_the_updates(
    make_lab: Callable[..., Any], sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnwise_torch.models import load_causal_lm

    lab = make_lab({"load_format": "auto", **SIZES[sizes]}, sequence_length=512)
    try:
        assert lab.backend.receivers("shared_memory") == 2
        check(lab, load_causal_lm(lab.context.model, "fp32", "eager"))
        model = lab.model(1)
        lab.serve(model)
        check(lab, model)
        monkeypatch.setattr(lab.context.chat, "stop_ids", ())
        other = lab.model(2)
        asked = [lab.request(seed, tokens=350, length=9 + 130 * (seed % 2), temperature=1.0) for seed in range(4)]
        for request, answer in zip(asked, across(lab, asked, other), strict=True):
            assert sorted(set(answer.versions.tolist())) == [lab.version - 1, lab.version]
            assert lab.off(model, request, answer, answer.versions < lab.version) < CLOSE
            assert lab.off(other, request, answer, answer.versions == lab.version) < CLOSE
    finally:
        lab.close()


@pytest.mark.parametrize("sizes", SIZES)
def test_every_process_takes_adapters_alone(
    make_lab: Callable[..., Any], adapted: Callable[..., Any], sizes: str
) -> None:
    from turnwise_torch.models import load_causal_lm

    lab = make_lab({"load_format": "auto", **SIZES[sizes]}, lora=Lora(4, 6, sync="adapter"))
    try:
        assert lab.backend.receivers("shared_memory") == 1
        check(lab, load_causal_lm(lab.context.model, "fp32", "eager"))
        model, tensors, config = adapted(lab.context.model, 1)
        lab.runner.run(lab.send(tensors.items(), adapter=config))
        check(lab, model)
    finally:
        lab.close()


def test_float32_weights_are_rounded_once_to_the_samplers_dtype(make_lab: Callable[..., Any]) -> None:
    import torch

    lab = make_lab(dtype="bf16")
    try:
        model = lab.model(1)
        whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in whole.items()}
        # The 16 upper bits alone: what rounding to nearest is not.
        cut = {
            name: (tensor.contiguous().view(torch.int32) >> 16 << 16).view(torch.float32)
            for name, tensor in whole.items()
        }
        answers = []
        for tensors in (whole, rounded, cut):
            lab.runner.run(lab.send(tensors.items()))
            answers.append(lab.ask(*[lab.request(seed, prompt=seed, temperature=1.0) for seed in range(8)]))
        for mine, same in zip(answers[0], answers[1], strict=True):
            assert mine.ids.tolist() == same.ids.tolist()
            assert np.array_equal(mine.logprobs, same.logprobs)
        assert any(
            not np.array_equal(mine.logprobs, other.logprobs)
            for mine, other in zip(answers[0], answers[2], strict=True)
        )
    finally:
        lab.close()
