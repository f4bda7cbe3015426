"""The backend: lockstep batches, versions, weights, pauses, aborts and errors that reach everyone who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_cases import StepLog, ask, check, long_one, together, with_backend

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import ConfigError, EngineError
from turnwise_hf import backend as backend_module
from turnwise_hf.backend import HfBackend
from turnwise_hf.config import HfConfig
from turnwise_hf.fixtures import backend_fixture
from turnwise_torch.models import load_causal_lm


def test_alone_it_serves_version_zero_with_ids_log_probs_and_text(folder: Path) -> None:
    request = ask(3, temperature=0.7)
    (generation,) = with_backend(folder, lambda backend: together(backend, request))
    model = load_causal_lm(folder, "fp32", "sdpa")
    assert generation.ids is not None
    check(generation, model, request, 0.7)
    assert generation.versions is not None
    assert generation.versions.tolist() == [0] * len(generation.ids)
    assert (generation.ids.dtype, generation.versions.dtype) == (np.int32, np.int32)
    assert generation.finish in ("stop", "length")
    assert isinstance(generation.text, str)


def test_the_conformance_fixture_agrees_with_the_backend() -> None:
    fixture = backend_fixture()

    async def main() -> Generation:
        backend = HfBackend(fixture["config"], fixture["context"])
        request = fixture["request"](4, temperature=0.7)
        generation = await backend.generate(request)
        assert generation.ids is not None
        expected = fixture["reference_logprobs"](np.concatenate([request.ids, generation.ids]), 0.7)
        assert generation.logprobs is not None
        np.testing.assert_allclose(generation.logprobs, expected[len(request.ids) :], atol=1e-4)
        await backend.close()
        return generation

    asyncio.run(main())


def test_a_batch_starts_when_every_live_episode_waits_in_the_order_of_the_requests(
    folder: Path, batches: list[list[int]]
) -> None:
    async def work(backend: HfBackend) -> None:
        backend.live(4)
        early = [asyncio.create_task(backend.generate(ask(seed, order=(0, 3 - seed)))) for seed in range(3)]
        await asyncio.sleep(0.05)
        assert batches == []
        await asyncio.gather(*early, backend.generate(ask(9, order=(0, 1, 5))))
        assert batches == [[2, 9, 1, 0]]
        late = [asyncio.create_task(backend.generate(ask(seed))) for seed in (5, 6)]
        await asyncio.sleep(0.05)
        assert len(batches) == 1
        backend.live(2)
        await asyncio.gather(*late)
        assert batches[1:] == [[5, 6]]

    with_backend(folder, work)


def test_a_limit_of_rows_cuts_a_batch_in_order(folder: Path, batches: list[list[int]]) -> None:
    requests = [ask(seed) for seed in (4, 2, 0, 3, 1)]
    cut = with_backend(folder, lambda backend: together(backend, *requests), infer_batch_size=2)
    assert batches == [[0, 1], [2, 3], [4]]
    whole = with_backend(folder, lambda backend: together(backend, *requests))
    assert [one.ids.tolist() for one in cut] == [one.ids.tolist() for one in whole]  # type: ignore[union-attr]


def test_equal_seeds_give_equal_tokens_and_other_seeds_others(folder: Path) -> None:
    one, two, *others = with_backend(
        folder, lambda backend: together(backend, ask(1), ask(1, order=(7,)), *map(ask, range(2, 12)))
    )
    assert one.ids is not None
    assert one.ids.tolist() == two.ids.tolist()  # type: ignore[union-attr]
    assert any(other.ids.tolist() != one.ids.tolist() for other in others)  # type: ignore[union-attr]


def test_a_request_given_up_no_longer_holds_the_others_back(folder: Path, batches: list[list[int]]) -> None:
    async def work(backend: HfBackend) -> None:
        backend.live(3)
        requests = [ask(seed) for seed in range(3)]
        tasks = [asyncio.create_task(backend.generate(request)) for request in requests[:2]]
        await asyncio.sleep(0)
        await backend.abort(requests[0])
        await backend.abort(requests[0])
        await backend.abort(requests[2])
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        backend.live(1)
        await tasks[1]
        assert batches == [[1]]
        backend.live(2)
        cancelled = asyncio.create_task(backend.generate(ask(5)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        await together(backend, ask(6), ask(7))
        assert batches == [[1], [6, 7]]

    with_backend(folder, work)


def test_a_request_aborted_while_sampled_leaves_the_batch(folder: Path) -> None:
    async def work(backend: HfBackend) -> None:
        requests = [ask(seed, limit=40) for seed in range(2)]
        gone = asyncio.create_task(backend.generate(requests[0]))
        stays = asyncio.create_task(backend.generate(requests[1]))
        await backend.pause()
        await asyncio.sleep(0.02)
        await backend.abort(requests[0])
        await backend.resume()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (await stays).finish in ("stop", "length")

    with_backend(folder, work)


def test_a_pause_stops_between_two_tokens_and_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, undisturbed = long_one(folder)
    log = StepLog(monkeypatch, stop_at=3)

    async def work(backend: HfBackend) -> Generation:
        task = asyncio.create_task(backend.generate(request))
        await asyncio.to_thread(log.reached.wait, 30)
        pausing = asyncio.create_task(backend.pause())
        await asyncio.sleep(0.02)
        assert not pausing.done()
        log.go.set()
        await pausing
        await asyncio.sleep(0.05)
        assert log.calls == 3
        assert not task.done()
        await backend.resume()
        return await task

    paused = with_backend(folder, work)
    assert paused.ids is not None
    assert undisturbed.ids is not None
    assert paused.ids.tolist() == undisturbed.ids.tolist()


def test_paused_before_it_starts_it_waits_for_resume(folder: Path, batches: list[list[int]]) -> None:
    async def work(backend: HfBackend) -> None:
        await backend.pause()
        task = asyncio.create_task(backend.generate(ask()))
        await asyncio.sleep(0.05)
        assert batches == []
        await backend.resume()
        await task

    with_backend(folder, work)


def test_a_stop_string_ends_the_response_and_stays_or_not(folder: Path) -> None:
    (free,) = with_backend(folder, lambda backend: together(backend, ask(2, limit=20, top_k=12)))
    assert free.ids is not None
    end = len(free.text) * 2 // 3
    string = free.text[end - 3 : end]
    place = free.text.index(string)

    def stopped(**args: Any) -> Generation:
        request = ask(2, limit=20, top_k=12, stop_strings=("never", string), **args)
        return with_backend(folder, lambda backend: together(backend, request))[0]

    inside, outside = stopped(), stopped(include_stop_str_in_output=False)
    assert inside.text == free.text[: place + len(string)]
    assert outside.text == free.text[:place]
    assert inside.ids is not None
    assert outside.ids is not None
    assert inside.ids.tolist() == outside.ids.tolist() == free.ids[: len(inside.ids)].tolist()
    assert len(inside.ids) < len(free.ids)
    assert inside.finish == "stop"


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(folder: Path) -> None:
    generations = with_backend(folder, lambda backend: together(backend, *[ask(seed, limit=40) for seed in range(20)]))
    stopped = [generation for generation in generations if generation.finish == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.ids is not None
        assert generation.ids[-1] == 2
        assert (generation.ids[:-1] != 2).all()
        assert not generation.text.endswith("<|im_end|>")


def test_a_response_ends_where_the_sequence_is_full(folder: Path) -> None:
    (generation,) = with_backend(folder, lambda backend: together(backend, ask(0, ids=[5] * 62, limit=10, top_k=1)))
    assert generation.ids is not None
    assert len(generation.ids) <= 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(ids=[5] * 64), "a prompt of 64 tokens leaves no room for a response within sequence_length 64"),
        (ask(ids=[5, 9999]), "token id 9999 is outside the model's vocabulary of "),
        (ask(ids=[5, -3]), "token id -3 is outside"),
        (ask(ids=[]), "the request has none"),
        (
            Request(0, GeneratingArgs(), 4, messages=({"role": "user", "content": "x"},), tag="Lake"),
            r"takes token ids, and the request has none \(request of Lake\)",
        ),
        (Request(0, GeneratingArgs(), 4, ids=int32([1]), images=(np.zeros((2, 2, 3), np.uint8),)), "takes text only"),
        (ask(limit=0), "cannot sample 0 tokens"),
        (ask(temperature=-1.0), "outside the allowed ranges"),
        (ask(top_p=0.0), "outside the allowed ranges"),
    ],
)
def test_a_request_that_cannot_be_served_is_reported_at_once_and_harms_nobody(
    folder: Path, request_: Request, message: str
) -> None:
    async def work(backend: HfBackend) -> None:
        backend.live(1)
        with pytest.raises(EngineError, match=message):
            await backend.generate(request_)
        await backend.generate(ask())

    with_backend(folder, work)


def test_a_crash_reaches_everyone_who_waits_with_its_cause_and_the_next_batch_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = backend_module.sample_batch

    def crash(*rest: Any) -> Any:
        monkeypatch.setattr(backend_module, "sample_batch", original)
        raise RuntimeError("device lost")

    monkeypatch.setattr(backend_module, "sample_batch", crash)

    async def work(backend: HfBackend) -> None:
        results = await asyncio.gather(*[backend.generate(ask(seed)) for seed in range(3)], return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineError)
            assert str(result) == "the hf backend failed: RuntimeError: device lost"
            assert isinstance(result.__cause__, RuntimeError)
        assert len({id(result) for result in results}) == 3
        await backend.generate(ask())

    with_backend(folder, work)


def test_out_of_memory_names_the_keys_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*rest: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(backend_module, "sample_batch", full)
    with pytest.raises(
        EngineError,
        match=r"out of memory while sampling 1 sequences of up to 10 tokens\. Fix: lower actor_infer\.infer_batch_size",
    ):
        with_backend(folder, lambda backend: together(backend, ask()))


def test_a_model_folder_that_vanished_reaches_the_request(make: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "model"
    shutil.copytree(make(), copy)

    async def work(backend: HfBackend) -> None:
        (copy / "model.safetensors").unlink()
        with pytest.raises(EngineError, match="cannot load the model"):
            await backend.generate(ask())

    with_backend(copy, work)


def test_closing_fails_what_waits_and_may_be_done_twice(folder: Path) -> None:
    async def work(backend: HfBackend) -> None:
        backend.live(5)
        waiting = asyncio.create_task(backend.generate(ask(1)))
        await asyncio.sleep(0)
        await backend.pause()
        backend.live(2)
        queued = asyncio.create_task(backend.generate(ask(2)))
        await asyncio.sleep(0)
        await backend.close()
        await backend.close()
        for task in (waiting, queued):
            with pytest.raises(EngineError, match="closed"):
                await task
        backend.live(1)
        with pytest.raises(EngineError, match="the backend is closed"):
            await backend.generate(ask())

    with_backend(folder, work)


def test_closing_ends_a_batch_in_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(monkeypatch, stop_at=2)

    async def work(backend: HfBackend) -> None:
        task = asyncio.create_task(backend.generate(ask(limit=50)))
        await asyncio.to_thread(log.reached.wait, 30)
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0.05)
        log.go.set()
        await closing
        with pytest.raises(EngineError, match="closed"):
            await task

    with_backend(folder, work)


def test_asleep_it_does_not_sample_and_awake_it_does(folder: Path) -> None:
    async def work(backend: HfBackend) -> None:
        await backend.sleep()
        with pytest.raises(EngineError, match="the backend sleeps"):
            await backend.generate(ask())
        await backend.wake("weights")
        await backend.wake("cache")
        await backend.generate(ask())

    with_backend(folder, work)


def test_what_it_cannot_be_built_with_is_reported_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the hf backend needs a model"):
        HfBackend(HfConfig(), InferenceContext(None, None))
    with pytest.raises(ConfigError, match="'flash_attention_2' is none of hf's: eager, sdpa"):
        HfBackend(HfConfig(), InferenceContext(folder, None, attn_implementation="flash_attention_2"))
    (tmp_path / "config.json").write_text("{}")
    from turnwise_hf.chat import HfChat

    with pytest.raises(ConfigError, match=r"config\.json without vocab_size"):
        HfBackend(HfConfig(), InferenceContext(tmp_path, HfChat(folder)))
