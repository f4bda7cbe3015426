"""The real engine: log-probs, seeds, weights that arrive in every way and at every moment, and a server that is
killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import ConfigError, EngineError
from turnwise_serving.http import Client
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_torch.broadcast import Broadcast, Hub
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import Sender, buckets

pytestmark = [pytest.mark.engines]
Life = Any
Offers = Callable[[int, int], Offer]
ATOL = 1e-4


def ask(seed: int = 0, limit: int = 40, ids: tuple[int, ...] = (1, 12, 13, 14, 2), **args: Any) -> Request:
    return Request(seed, GeneratingArgs(**{"max_new_tokens": limit, **args}), limit, (seed,), ids=int32(ids))


async def together(backend: SglangBackend, *requests: Request) -> list[Generation]:
    return list(await asyncio.gather(*map(backend.generate, requests)))


def differences(request: Request, answer: Generation, temperature: float, seed: int) -> np.ndarray:
    """|log-prob − that of a plain forward pass of the model of `seed`| for every token."""
    assert request.ids is not None and answer.ids is not None and answer.logprobs is not None
    expected = fixtures.reference_logprobs(np.concatenate([request.ids, answer.ids]), temperature, fixtures.model(seed))
    return np.abs(answer.logprobs - expected[len(request.ids) :])


def parity(life: Life, model: int, temperature: float) -> None:
    requests = [ask(seed, temperature=temperature) for seed in range(4)]
    for request, answer in zip(requests, life.run(together(life.backend, *requests)), strict=True):
        assert differences(request, answer, temperature, model).max() < ATOL


WAITS = (0.3, 0.1, 0.03)
"""Seconds until requests are under way and have not all ended: which, depends on the machine."""


async def streamed(
    backend: SglangBackend, version: int, model: int, named: list[tuple[str, torch.Tensor]] | None = None
) -> int:
    """The weights of the model of `model` by shared memory, a decoder layer at a time."""
    state = load_causal_lm(fixtures.model(model), "fp32", "eager").state_dict()
    sender = Sender(1, 240.0)
    offered = list(buckets(state.items() if named is None else named, 1))
    assert len(offered) > 2 or named is not None
    sending = asyncio.create_task(asyncio.to_thread(sender.send, offered))
    version = await backend.receive(Offer("shared_memory", version, sender.payload))
    await sending
    return version


async def broadcast(backend: SglangBackend, sender: Broadcast, version: int, model: int) -> int:
    """The weights of the model of `model` by a process group, a decoder layer at a time."""
    state = load_causal_lm(fixtures.model(model), "fp32", "eager").state_dict()
    sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(state.items(), 1)))
    try:
        return await backend.receive(Offer("process_group", version, sender.payload))
    except EngineError as error:
        (outcome,) = await asyncio.gather(sending, return_exceptions=True)
        error.add_note(f"the trainer's side: {outcome!r}")
        raise
    finally:
        await asyncio.gather(sending, return_exceptions=True)


def test_random_weights_are_not_sampled_from_before_the_first_update(life: Life) -> None:
    with pytest.raises(EngineError, match="load_format: dummy holds random weights"):
        life.run(life.backend.generate(ask()))


def test_log_probs_are_the_models_before_and_after_an_update_by_shared_memory(life: Life) -> None:
    assert life.run(streamed(life.backend, 0, model=0)) == 0
    for temperature in (0.7, 1.0):
        parity(life, 0, temperature)
    assert life.run(streamed(life.backend, 1, model=1)) == 1
    for temperature in (0.7, 1.0):
        parity(life, 1, temperature)
    (answer,) = life.run(together(life.backend, ask()))
    assert set(answer.versions.tolist()) == {1}


def test_log_probs_are_the_models_after_an_update_from_a_folder(life: Life, folder_offer: Offers) -> None:
    assert life.run(life.backend.receive(folder_offer(2, 0))) == 2
    parity(life, 0, 0.7)
    with pytest.raises(EngineError, match="tensors were not offered"):
        life.run(life.backend.receive(Offer("safetensors", 3, {"folder": "/nowhere"})))
    assert life.run(life.backend.receive(folder_offer(2, 0))) == 2


def test_log_probs_are_the_models_after_updates_by_a_process_group(life: Life, folder_offer: Offers) -> None:
    hub, groups = Hub("", torch.device("cpu"), 60.0), set()
    for model in (1, 0):
        assert life.run(broadcast(life.backend, hub.sender(1), 2, model)) == 2
        parity(life, model, 0.7)
        groups.add(hub.name)
    assert len(groups) == 1, "the group is kept from update to update"
    hub.close()
    other = Hub("", torch.device("cpu"), 60.0)  # as a trainer that was started again
    assert life.run(broadcast(life.backend, other.sender(1), 2, 1)) == 2
    parity(life, 1, 1.0)
    other.close()


def test_a_process_group_without_its_trainer_or_with_an_absent_partner_ends_in_one_error(
    life: Life, folder_offer: Offers
) -> None:
    hub = Hub("", torch.device("cpu"), 3.0)
    gone = hub.sender(1)
    gone.close()
    with pytest.raises(EngineError, match=r"weight update: the trainer's offer at 127\.0\.0\.1:\d+ is gone"):
        life.run(life.backend.receive(Offer("process_group", 2, gone.payload)))
    with pytest.raises(EngineError, match="failed half-way, so nothing may be sampled"):
        life.run(life.backend.generate(ask()))
    begun = time.monotonic()
    with pytest.raises(EngineError, match="weight update: the trainer stopped sending"):
        life.run(broadcast(life.backend, hub.sender(2), 2, 1))
    assert time.monotonic() - begun < 15
    assert life.run(broadcast(life.backend, hub.sender(1), 2, 1)) == 2
    parity(life, 1, 1.0)
    hub.close()
    assert life.run(life.backend.receive(folder_offer(2, 0))) == 2


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


def test_weights_that_arrive_in_mid_generation_divide_the_response(life: Life, folder_offer: Offers) -> None:
    """Tokens before the cut are the old model's, those after it the new one's, recomputed from the ids."""

    async def scene() -> tuple[Request, Generation]:
        requests = [ask(seed, limit=480, temperature=0.7, ids=(12,)) for seed in range(24)]
        tasks = [asyncio.create_task(life.backend.generate(request)) for request in requests]
        await asyncio.sleep(0.25)
        assert await life.backend.receive(folder_offer(3, 1)) == 3
        answers = await asyncio.gather(*tasks)
        return next(
            (request, a) for request, a in zip(requests, answers, strict=True) if len(set(a.versions.tolist())) == 2
        )

    request, answer = life.run(scene())
    assert answer.versions.tolist() == sorted(answer.versions.tolist())
    for version, model in ((2, 0), (3, 1)):
        of = answer.versions == version
        assert differences(request, answer, 0.7, model)[of].max() < ATOL
        assert differences(request, answer, 0.7, 1 - model)[of].max() > 0.1


def test_a_prompt_in_the_cache_is_computed_again_after_an_update(life: Life, folder_offer: Offers) -> None:
    long = tuple([1, 12, 13, 14] * 40)
    life.run(together(life.backend, ask(ids=long, limit=2)))
    life.run(life.backend.receive(folder_offer(4, 0)))
    request = ask(ids=long, limit=4)
    (answer,) = life.run(together(life.backend, request))
    assert differences(request, answer, 1.0, 0).max() < ATOL


def test_names_and_shapes_that_the_engine_would_pass_over_are_refused(life: Life, folder_offer: Offers) -> None:
    state = load_causal_lm(fixtures.model(1), "fp32", "eager").state_dict()
    first = next(iter(state.items()))
    cases = [
        (
            [*state.items(), ("model.layers.0.typo.weight", torch.zeros(2))],
            r"offers 'model\.layers\.0\.typo\.weight', which the model's folder",
        ),
        ([first], "tensors were not offered, such as"),
        ([(first[0], first[1][:1].clone())], "has shape"),
    ]
    for named, message in cases:

        async def scene(named: Any = named) -> None:
            with pytest.raises(EngineError, match=message):  # noqa: B023 - run in this round
                await streamed(life.backend, 5, 1, named)
            with pytest.raises(EngineError, match="failed half-way, so nothing may be sampled"):
                await life.backend.generate(ask())

        life.run(scene())
    assert life.run(life.backend.receive(folder_offer(5, 0))) == 5
    parity(life, 0, 1.0)


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
        for wait in WAITS:
            requests = [ask(seed, limit=450, ids=(12,)) for seed in range(8)]
            tasks = [asyncio.create_task(life.backend.generate(request)) for request in requests]
            await asyncio.sleep(wait)
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


def test_responses_in_progress_are_sampled_anew_where_the_pause_aborts_them(life: Life, folder_offer: Offers) -> None:
    async def scene() -> list[Generation]:
        backend = SglangBackend(
            fixtures.attach(life.backend.links.current.server, pause_mode="abort"), fixtures.context()
        )
        for wait in WAITS:
            await backend.receive(folder_offer(6, 1))
            tasks = [asyncio.create_task(backend.generate(ask(seed, limit=480, ids=(12,)))) for seed in range(16)]
            await asyncio.sleep(wait)
            assert await backend.receive(folder_offer(7, 0)) == 7
            answers = await asyncio.gather(*tasks)
            if any(answer.versions[0] == 7 for answer in answers):
                break
        await backend.close()
        return answers

    answers = life.run(scene())
    assert all(len(set(answer.versions.tolist())) == 1 for answer in answers)
    assert any(answer.versions[0] == 7 for answer in answers)


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


def trained(folder: Path, server: str, lora: str = "") -> None:
    """`turnwise train` with torch, whose weights reach the server over shared memory at every step."""
    text = (Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8")
    outcome = text.format(model=fixtures.model(0), server=server, output=folder / "out", lora=lora)
    (folder / "tiny.yaml").write_text(outcome, encoding="utf-8")
    command = [sys.executable, "-m", "turnwise.cli.main", "train", "tiny.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (folder / "out" / "checkpoints" / "checkpoint-000002").is_dir()


def test_a_run_trains_with_an_attached_server(life: Life, tmp_path: Path) -> None:
    outcome = fixtures.attach(life.backend.links.current.server)
    trained(tmp_path, f'base_url: "{outcome.base_url}", api_key_env: {outcome.api_key_env}')


@pytest.mark.matrix
def test_a_run_trains_adapters_and_sends_them_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the trainer's adapters are PEFT's")
    trained(
        tmp_path, f"python: {fixtures.interpreter()}", ", lora_rank: 4, lora_target: all-linear, lora_sync: adapter"
    )


def test_a_killed_server_is_replaced_with_its_weights_and_its_requests_are_answered(life: Life, shared: Any) -> None:
    """The last test of the session's server."""

    async def scene() -> tuple[list[Request], list[Generation], list[Generation]]:
        await streamed(life.backend, 8, model=1)
        requests = [ask(seed, limit=480, ids=(12,), temperature=0.7) for seed in range(24)]
        begun = time.monotonic()
        expected = await together(life.backend, *requests)
        took = time.monotonic() - begun
        old = life.backend.links.current.server
        tasks = [asyncio.create_task(life.backend.generate(request)) for request in requests]
        await asyncio.sleep(took / 4)
        left.extend(shared(old.pid))
        os.kill(old.pid, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert life.backend.links.current.server.pid != old.pid
        return requests, expected, answers

    left: list[Path] = []
    requests, expected, answers = life.run(scene())
    assert any(path.name.startswith("sglang_loads_") for path in left)
    assert [path for path in left if path.exists()] == []
    for request, before, after in zip(requests, expected, answers, strict=True):
        assert after.ids.tolist() == before.ids.tolist()
        assert set(after.versions.tolist()) == {8}
        assert differences(request, after, 0.7, 1).max() < ATOL


@pytest.mark.matrix
def test_a_server_killed_after_a_process_group_update_serves_again_with_the_next(life: Life) -> None:
    async def scene() -> None:
        hub = Hub("", torch.device("cpu"), 120.0)
        await broadcast(life.backend, hub.sender(1), 9, 0)
        os.kill(life.backend.links.current.server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="its weights had come by process_group, which keeps no copy"):
            await life.backend.generate(ask())
        assert await broadcast(life.backend, hub.sender(1), 10, 1) == 10
        hub.close()

    life.run(scene())
    parity(life, 1, 0.7)


def test_closing_stops_the_server_and_all_that_it_started(life: Life, shared: Any) -> None:
    group = life.backend.links.current.server.pid
    left = shared(group)
    assert left
    life.run(life.backend.close())
    life.run(life.backend.close())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("processes of the server's group live on")
    assert [path for path in left if path.exists()] == []
    with pytest.raises(EngineError, match="the backend was closed"):
        life.run(life.backend.generate(ask()))
