"""What the strategy `torch` sends of a model with experts is what the backend samples from, to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.rows import Rows
from turnwise.data.trajectory import Generation, int32
from turnwise_hf.backend import HfBackend
from turnwise_hf.config import HfConfig
from turnwise_torch.strategy import TorchStrategy

PROMPT = (1, 12, 13, 14, 2)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "safetensors"])
def test_experts_arrive_as_the_trainer_has_them_and_log_probs_agree(make: Callable[..., Path], transport: str) -> None:
    trained = make(architecture="qwen3_moe", seed=8)
    strategy = TorchStrategy(
        None,
        TrainContext(trained, "actor_train", dtype="fp32", objective=Objective(LossChoice("ppo")), bucket_bytes=10_000),
    )
    request = Request(0, GeneratingArgs(8, 1.0), 8, (0,), ids=int32(PROMPT))

    async def work() -> Generation:
        context = InferenceContext(
            make(architecture="qwen3_moe"), None, dtype="fp32", sequence_length=64, weight_sync_timeout=20.0
        )
        backend = HfBackend(HfConfig(), context)
        try:
            offer = strategy.offer(transport, 3)
            assert (await asyncio.gather(asyncio.to_thread(strategy.send, offer), backend.receive(offer)))[1] == 3
            # Tensor by tensor: an expert that no token of the answer chose would show nowhere else.
            assert backend._own is not None
            held, own = strategy.model.state_dict(), backend._own.state_dict()
            assert held.keys() == own.keys()
            assert all(torch.equal(held[name], own[name]) for name in held)
            return await backend.generate(request)
        finally:
            await backend.close()

    try:
        answer = asyncio.run(asyncio.wait_for(work(), 60))
        assert answer.ids is not None
        assert answer.logprobs is not None
        ids = int32([*PROMPT, *answer.ids])
        sampled = np.arange(len(ids)) >= len(PROMPT)
        rows = Rows(input_ids=ids, offsets=np.array([0, len(ids)]), response_mask=sampled, columns={})
        np.testing.assert_allclose(answer.logprobs, strategy.logprobs(rows), atol=1e-5)
    finally:
        strategy.close()
