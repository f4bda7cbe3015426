"""A real server behind the endpoint: SGLang's own OpenAI interface, with token ids and log-probs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation
from turnwise_openai.backend import OpenAIBackend
from turnwise_openai.config import OpenAIConfig

pytestmark = [pytest.mark.engines, pytest.mark.matrix]
fixtures = pytest.importorskip("turnwise_sglang.fixtures", reason="turnwise-sglang starts the server of this test")


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
EPISODES = 3
KEY = "TURNWISE_TEST_KEY"
SMALL = (
    f"val_env_manager.num_env_groups={EPISODES}",
    "val_env_manager.generating_args.max_new_tokens=16",
    "custom_envs.FrozenLake.max_steps=2",
)


def judged(folder: Path, url: str) -> str:
    """What `turnwise eval` prints of the README's YAML with the endpoint at `url`."""
    (folder / "run.yaml").write_text(README, encoding="utf-8")
    options = "actor_infer.strategy_args.strategy_config"
    command = [
        sys.executable,
        "-m",
        "turnwise.cli.main",
        "eval",
        "run.yaml",
        "--json",
        f"{options}.model=tiny",
        f"{options}.base_url={url}",
        *SMALL,
    ]
    command.append(f"{options}.api_key_env={KEY}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_sglangs_endpoint_plays_with_ids_and_log_probs_that_are_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnwise_sglang.config import SglangConfig
    from turnwise_sglang.links import Links

    request = Request(3, GeneratingArgs(temperature=0.7), 12, messages=({"role": "user", "content": "Which way?"},))

    async def scene() -> tuple[Generation, str]:
        # Its own tokenizer, which the ids of training do without, is what an endpoint of messages needs.
        config = SglangConfig(python=fixtures.interpreter(), engine_args={"skip_tokenizer_init": False})
        links = Links(config, fixtures.context())
        try:
            link = await links.get()
            assert link.server is not None
            monkeypatch.setenv(KEY, link.server.key)
            url = link.api.url
            options = OpenAIConfig(
                model="tiny",
                base_url=f"{url}/v1",
                api_key_env=KEY,
                logprobs="scaled",
                extra_body={"return_token_ids": True},
            )
            backend = OpenAIBackend(options, InferenceContext(None, None))
            answer = await backend.generate(request)
            await backend.close()
            return answer, await asyncio.to_thread(judged, tmp_path, f"{url}/v1")
        finally:
            await links.close()

    answer, verdict = asyncio.run(scene())
    prompt = fixtures.chat().render(list(request.messages or ()))
    assert answer.ids is not None and answer.logprobs is not None
    expected = fixtures.reference_logprobs(np.concatenate([prompt, answer.ids]), 0.7)[len(prompt) :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert answer.text
    assert json.loads(verdict)
