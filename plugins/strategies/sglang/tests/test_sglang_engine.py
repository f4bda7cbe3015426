"""The real engine: log-probs, seeds, the ends of responses, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch
from sglang_served import ATOL, ROUNDS, ask, differences, long_ones, parity, streamed, together, under_way

from turnwise.data.trajectory import Generation
from turnwise.errors import ConfigError, EngineError
from turnwise_serving.http import Client
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_torch.models import load_causal_lm

pytestmark = [pytest.mark.engines]
Life = Any


def test_random_weights_are_not_sampled_from_before_the_first_update(life: Life) -> None:
    with pytest.raises(EngineError, match="load_format: dummy holds random weights"):
        life.run(life.backend.generate(ask()))


def test_log_probs_are_the_models_before_and_after_an_update_by_shared_memory(life: Life) -> None:
    for version, model in ((0, 1), (1, 0)):
        assert life.run(streamed(life.backend, version, model)) == version
        for temperature in (0.7, 1.0):
            parity(life, model, temperature)
        (answer,) = life.run(together(life.backend, ask()))
        assert set(answer.versions.tolist()) == {version}


@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 3}])
def test_truncation_decides_the_token_and_not_its_log_prob(life: Life, truncation: dict[str, Any]) -> None:
    requests = [ask(seed, temperature=0.7, **truncation) for seed in range(3)]
    for request, answer in zip(requests, life.run(together(life.backend, *requests)), strict=True):
        assert differences(request, answer, 0.7, 0).max() < ATOL


def test_greedy_is_the_largest_logit_with_log_probs_of_temperature_one(life: Life) -> None:
    request = ask(temperature=0.0, limit=8)
    one, other = life.run(together(life.backend, request, ask(5, temperature=0.0, limit=8)))
    assert one.ids.tolist() == other.ids.tolist()
    assert differences(request, one, 1.0, 0).max() < ATOL
    tokens = torch.tensor([[*request.ids.tolist(), *one.ids.tolist()]])  # type: ignore[union-attr]
    with torch.no_grad():
        best = load_causal_lm(fixtures.model(0), "fp32", "eager")(input_ids=tokens).logits[0].argmax(-1)
    assert one.ids.tolist() == best[len(request.ids) - 1 : -1].tolist()  # type: ignore[arg-type]


def test_equal_seeds_give_equal_tokens_in_any_company(life: Life) -> None:
    alone = life.run(together(life.backend, ask(2**63 + 5)))[0].ids.tolist()
    company = life.run(together(life.backend, *[ask(seed) for seed in range(6)], ask(2**63 + 5)))
    assert company[-1].ids.tolist() == alone
    assert len({tuple(answer.ids.tolist()) for answer in company}) > 3


def test_a_stop_id_ends_a_response_and_is_part_of_it(life: Life) -> None:
    answers = life.run(together(life.backend, *[ask(seed, limit=60) for seed in range(12)]))
    stops = set(fixtures.chat().stop_ids)
    assert {"stop", "length"} >= {answer.finish for answer in answers}
    for answer in answers:
        assert (answer.ids[-1] in stops) == (answer.finish == "stop")
        assert not stops & set(answer.ids[:-1].tolist())
    assert any(answer.finish == "stop" for answer in answers)


def test_a_stop_string_ends_a_response_with_the_token_that_completed_it(life: Life) -> None:
    whole = next(a for a in life.run(together(life.backend, *[ask(seed) for seed in range(8)])) if len(a.ids) > 12)
    seed = next(
        seed for seed in range(8) if life.run(together(life.backend, ask(seed)))[0].ids.tolist() == whole.ids.tolist()
    )
    words = fixtures.chat().decode(whole.ids[4:6]).split()
    (cut,) = life.run(together(life.backend, ask(seed, stop_strings=(words[-1],), include_stop_str_in_output=False)))
    assert cut.finish == "stop"
    assert len(cut.ids) == len(cut.logprobs) == len(cut.versions) <= 6
    assert cut.ids.tolist() == whole.ids.tolist()[: len(cut.ids)]
    assert words[-1] not in cut.text


def test_a_response_fills_the_sequence_to_its_last_token(life: Life) -> None:
    ids = (1, *([12] * (fixtures.LENGTH - 4)))
    answers = life.run(together(life.backend, *[ask(seed, ids=ids, limit=40) for seed in range(8)]))
    assert max(len(answer.ids) for answer in answers) == 3
    assert all(len(answer.ids) == 3 or answer.finish == "stop" for answer in answers)


def test_what_would_kill_the_server_is_refused_before_it_is_sent(life: Life) -> None:
    for request, message in (
        (ask(ids=(1, 10**6)), "token id 1000000 is outside the model's vocabulary"),
        (ask(ids=(1, -2)), "token id -2 is outside"),
        (ask(ids=(1,) * fixtures.LENGTH), "leaves no room"),
    ):
        with pytest.raises(EngineError, match=message):
            life.run(life.backend.generate(request))
    life.run(together(life.backend, ask()))


def test_a_request_given_up_leaves_the_server(life: Life) -> None:
    async def scene() -> None:
        requests = list(await long_ones(life.backend))
        for _ in range(ROUNDS):
            tasks = await under_way(life.backend, requests)
            for request in requests:
                await life.backend.abort(request)
                await life.backend.abort(request)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            given_up = [end for end in ends if isinstance(end, asyncio.CancelledError)]
            assert all(isinstance(end, Generation) for end in ends if end not in given_up)
            if given_up:
                break
        assert given_up
        await life.backend.generate(ask())

    life.run(scene())


def test_an_attached_server_that_ignores_seeds_or_is_not_there_is_reported(life: Life) -> None:
    async def scene() -> None:
        server = life.backend.links.current.server
        wrong = SglangBackend(fixtures.attach(server, dp_size=2), fixtures.context())
        with pytest.raises(ConfigError, match="has dp_size 1, the configuration 2"):
            await wrong.generate(ask())
        other = SglangBackend(
            fixtures.attach(server), fixtures.context(model=fixtures.model(1), updates=False, dtype="bf16")
        )
        with pytest.raises(
            ConfigError,
            match=(
                r"and no weights will be sent\. Fix: start it with --model-path /.*\n.*has the dtype float32, the run"
                r" bf16"
            ),
        ):
            await other.generate(ask())
        absent = SglangBackend(SglangConfig(base_url="http://127.0.0.1:9"), fixtures.context())
        with pytest.raises(EngineError, match=r"no SGLang server answers at http://127\.0\.0\.1:9 "):
            await absent.generate(ask())
        for backend in (wrong, other, absent):
            await backend.close()

    life.run(scene())


@pytest.mark.parametrize("key", [None, "another"])
def test_who_lacks_the_servers_key_gets_nothing_from_it(life: Life, key: str | None) -> None:
    async def scene() -> None:
        server = life.backend.links.current.server
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert not any(server.key in word for process in family for word in process.cmdline())
        client = Client(server.url, 30.0, key)
        paths = (
            "/generate",
            "/v1/completions",
            "/update_weights_from_disk",
            "/pause_generation",
            "/flush_cache",
            "/load_lora_adapter_from_tensors",
        )
        calls = [*(("POST", path) for path in paths), ("GET", "/server_info"), ("GET", "/model_info")]
        assert {(await client.send(method, path, {})).status_code for method, path in calls} == {401}
        assert await client.healthy()
        await client.close()
        if key is None:
            unnamed = SglangBackend(SglangConfig(base_url=server.url), fixtures.context())
            with pytest.raises(
                EngineError, match=r"SGLang refused /server_info \(401\).* Fix: strategy_config\.api_key_env"
            ):
                await unnamed.generate(ask())
            await unnamed.close()

    life.run(scene())


def test_the_conformance_kit_passes(life: Life) -> None:
    code = (
        "from turnwise.testing.kit import run_conformance; import sys; sys.exit(run_conformance('sglang',"
        " 'inference_backend', strict=True))"
    )
    server = life.backend.links.current.server
    environment = {**os.environ, fixtures.URL: server.url, fixtures.KEY: server.key}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
