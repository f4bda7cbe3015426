"""The real engine and new weights: they arrive in every way and at every moment, also in a server that took the place
of one that was killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_served import (
    ATOL,
    ROUNDS,
    ask,
    broadcast,
    differences,
    folder_offer,
    goes_on,
    long_ones,
    parity,
    sent,
    state,
    streamed,
    together,
    under_way,
)

from turnwise.contracts.inference import Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_torch.broadcast import Hub

pytestmark = [pytest.mark.engines]
Life = Any


def test_log_probs_are_the_models_after_an_update_from_a_folder(life: Life) -> None:
    assert life.run(life.backend.receive(folder_offer(2, 0))) == 2
    parity(life, 0, 0.7)
    with pytest.raises(EngineError, match="tensors were not offered"):
        life.run(life.backend.receive(Offer("safetensors", 3, {"folder": "/nowhere"})))
    assert life.run(life.backend.receive(folder_offer(2, 0))) == 2


def test_log_probs_are_the_models_after_updates_by_a_process_group(life: Life) -> None:
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


def test_a_process_group_without_its_trainer_or_with_an_absent_partner_ends_in_one_error(life: Life) -> None:
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


@pytest.mark.parametrize(
    ("mode", "transport", "temperature"),
    [
        ("retract", "shared_memory", 0.0),
        ("retract", "shared_memory", 0.7),
        ("retract", "process_group", 0.7),
        ("retract", "safetensors", 0.0),
        ("abort", "safetensors", 0.7),
    ],
)
def test_weights_that_arrive_in_mid_generation_divide_the_response(
    life: Life, mode: str, transport: str, temperature: float
) -> None:
    async def scene() -> None:
        server = life.backend.links.current.server
        attached = SglangBackend(fixtures.attach(server, pause_mode=mode), fixtures.context())
        await goes_on(attached if mode == "abort" else life.backend, transport, temperature)
        await attached.close()

    life.run(scene())


def test_an_update_that_fails_half_way_ends_the_responses_on_their_way(life: Life) -> None:
    """They would go on with a mixture of weights, as tokens of the old version."""
    first = next(iter(state(1).items()))

    async def scene() -> list[str]:
        await sent(life.backend, "safetensors", 4, 0)
        whole = await long_ones(life.backend)
        for _ in range(ROUNDS):
            tasks = await under_way(life.backend, list(whole))
            with pytest.raises(EngineError, match="tensors were not offered"):
                await streamed(life.backend, 5, 1, [first])
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for undisturbed, end in zip(whole.values(), ends, strict=True):
                assert isinstance(end, EngineError) or end.ids.tolist() == undisturbed.ids.tolist()
            await sent(life.backend, "safetensors", 4, 0)
            if errors := [str(end) for end in ends if isinstance(end, EngineError)]:
                return errors
        pytest.fail("the update met no response on its way")

    assert all("failed half-way, so nothing may be sampled" in error for error in life.run(scene()))
    parity(life, 0, 0.7)


def test_a_request_that_somebody_else_aborts_is_an_error(life: Life) -> None:
    async def scene() -> list[str]:
        await sent(life.backend, "safetensors", 4, 0)
        whole = await long_ones(life.backend)
        for _ in range(ROUNDS):
            tasks = await under_way(life.backend, list(whole))
            await life.backend.links.current.api.call("/abort_request", {"abort_all": True})
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            if errors := [str(end) for end in ends if isinstance(end, EngineError)]:
                return errors
        pytest.fail("no response was on its way")

    assert all(error.startswith("SGLang aborted a request: ") for error in life.run(scene()))


def test_a_prompt_in_the_cache_is_computed_again_after_an_update(life: Life) -> None:
    long = tuple([1, 12, 13, 14] * 40)
    life.run(together(life.backend, ask(ids=long, limit=2)))
    life.run(life.backend.receive(folder_offer(4, 0)))
    request = ask(ids=long, limit=4)
    (answer,) = life.run(together(life.backend, request))
    assert differences(request, answer, 1.0, 0).max() < ATOL


def test_names_and_shapes_that_the_engine_would_pass_over_are_refused(life: Life) -> None:
    weights = state(1)
    first = next(iter(weights.items()))
    cases = [
        (
            [*weights.items(), ("model.layers.0.typo.weight", torch.zeros(2))],
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


def trained(folder: Path, server: str, steps: int = 2, tokens: int = 4, **more: str) -> list[dict[str, float]]:
    """The metrics of `turnwise train` with torch, whose weights reach the server over shared memory at every step."""
    text = (Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8")
    given = {"lora": "", "more": "recompute_old_logprobs: false", **more}
    outcome = text.format(
        model=fixtures.model(0), server=server, output=folder / "out", steps=steps, tokens=tokens, **given
    )
    (folder / "tiny.yaml").write_text(outcome, encoding="utf-8")
    command = [sys.executable, "-m", "turnwise.cli.main", "train", "tiny.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (folder / "out" / "checkpoints" / f"checkpoint-{steps:06d}").is_dir()
    lines = (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def attached(life: Life) -> str:
    """What a run's `strategy_config` holds to attach to the session's server."""
    outcome = fixtures.attach(life.backend.links.current.server)
    return f'base_url: "{outcome.base_url}", api_key_env: {outcome.api_key_env}'


def test_a_run_trains_with_an_attached_server(life: Life, tmp_path: Path) -> None:
    trained(tmp_path, attached(life))


AHEAD = """async_generation_ratio: 1
weight_update: {way}
eval_steps: 2
val_env_manager: {{num_env_groups: 4, group_size: 1, tags: [FrozenLake]}}
"""


@pytest.mark.parametrize("way", ["between_batches", "between_turns", "between_tokens"])
def test_a_run_trains_with_a_batch_ahead(life: Life, tmp_path: Path, way: str) -> None:
    lines = trained(tmp_path, attached(life), steps=4, tokens=48, more=AHEAD.format(way=way))
    steps = [line for line in lines if "async/staleness/max" in line]
    assert len(steps) == 4
    assert max(line["async/staleness/max"] for line in steps) <= 1
    assert all(line["async/version_span"] <= (way == "between_tokens") for line in steps)
    if way == "between_batches":
        assert [line["async/staleness/max"] for line in steps] == [0, 1, 1, 1]
    evaluations = [line["val/version_span"] for line in lines if "val/version_span" in line]
    assert evaluations and set(evaluations) == {0}


@pytest.mark.matrix
def test_a_run_trains_adapters_and_sends_them_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the trainer's adapters are PEFT's")
    lora = ", lora_rank: 4, lora_target: all-linear, lora_sync: adapter"
    trained(tmp_path, f"python: {fixtures.interpreter()}", lora=lora)


def test_a_killed_server_is_replaced_with_its_weights_and_its_requests_are_answered(life: Life, shared: Any) -> None:
    """The last test of the session's server."""

    async def scene() -> tuple[list[Request], list[Generation], list[Generation]]:
        await streamed(life.backend, 8, model=1)
        whole = await long_ones(life.backend, 0.7)
        requests, expected = list(whole), list(whole.values())
        old = life.backend.links.current.server
        tasks = await under_way(life.backend, requests)
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
