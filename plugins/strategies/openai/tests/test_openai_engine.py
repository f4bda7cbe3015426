"""A real server behind the endpoint: SGLang's own OpenAI interface, with token ids and log-probs."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation
from turnwise_openai.backend import OpenAIBackend
from turnwise_openai.config import OpenAIConfig

pytestmark = [pytest.mark.engines, pytest.mark.matrix]
fixtures = pytest.importorskip("turnwise_sglang.fixtures", reason="turnwise-sglang starts the server of this test")


def test_sglangs_endpoint_plays_with_ids_and_log_probs_that_are_the_models() -> None:
    from turnwise_sglang.config import SglangConfig
    from turnwise_sglang.link import Links

    request = Request(3, GeneratingArgs(temperature=0.7), 12, messages=({"role": "user", "content": "Which way?"},))

    async def scene() -> Generation:
        # Its own tokenizer, which the ids of training do without, is what an endpoint of messages needs.
        config = SglangConfig(python=fixtures.interpreter(), engine_args={"skip_tokenizer_init": False})
        links = Links(config, fixtures.context())
        try:
            url = (await links.get()).api.url
            options = OpenAIConfig(model="tiny", base_url=f"{url}/v1", api_key_env=None, logprobs="scaled", extra_body={"return_token_ids": True})
            backend = OpenAIBackend(options, InferenceContext(None, None))
            answer = await backend.generate(request)
            await backend.close()
            return answer
        finally:
            await links.close()

    answer = asyncio.run(scene())
    prompt = fixtures.chat().render(list(request.messages or ()))
    assert answer.ids is not None and answer.logprobs is not None
    expected = fixtures.reference_logprobs(np.concatenate([prompt, answer.ids]), 0.7)[len(prompt) :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert answer.text
