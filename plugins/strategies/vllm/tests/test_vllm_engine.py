"""The real engine in this process: log-probs by definition, seeds, ends, aborts; weights in place, and the ways in
which they go wrong silently."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm_cases import CLOSE, FAR, IN_PROCESS

from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.errors import ConfigError, EngineError, EngineLost

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240), *IN_PROCESS]
Models = Callable[[int], Any]


def test_dummy_weights_serve_nothing_before_the_first_update(lab: Any) -> None:
    with pytest.raises(EngineError, match="no weights have come yet"):
        lab.ask(lab.request())


def test_log_probs_are_those_of_a_plain_forward_pass_after_the_first_update(lab: Any, models: Models) -> None:
    model = models(1)
    assert lab.serve(model) == lab.version
    requests = [
        lab.request(seed, length=5 + 7 * seed, prompt=seed, temperature=t)
        for seed, t in enumerate((0.7, 1.0, 0.0, 0.7))
    ]
    for request, answer in zip(requests, lab.ask(*requests), strict=True):
        assert lab.off(model, request, answer) < CLOSE
        assert set(answer.versions.tolist()) == {lab.version}
        assert answer.finish in ("length", "stop")


def test_log_probs_of_a_truncated_request_are_left_out(lab: Any, models: Models) -> None:
    lab.serve(models(1))
    truncated = [lab.request(temperature=0.7, top_p=0.5), lab.request(temperature=0.7, top_k=3)]
    whole = lab.request(temperature=0.7)
    *left_out, kept = lab.ask(*truncated, whole)
    assert [answer.logprobs for answer in left_out] == [None, None]
    assert lab.off(models(1), whole, kept) < CLOSE, "a neighbour's truncation changed this request's log-probs"


@pytest.fixture
def endless(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a turn: responses are as long as they may be."""
    monkeypatch.setattr(lab.context.chat, "stop_ids", ())


def test_tied_embeddings_are_new_under_both_names(lab: Any, models: Models) -> None:
    lab.serve(models(1))
    model = models(2)
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    assert "lm_head.weight" not in dict(named)
    lab.runner.run(lab.send(named))
    request = lab.request(5)
    (answer,) = lab.ask(request)
    assert lab.off(model, request, answer) < CLOSE


@pytest.mark.parametrize(
    ("left_out", "expected"), [("self_attn.k_proj", "k_proj"), ("mlp.up_proj", "up_proj"), ("model.norm", "model.norm")]
)
def test_a_part_of_a_fused_layer_is_refused_and_a_whole_update_repairs(
    lab: Any, models: Models, left_out: str, expected: str
) -> None:
    model = models(2)
    with pytest.raises(
        EngineError, match=rf"^vLLM failed: the weight update lacks \d+ tensors of the model, such as '.*{expected}"
    ):
        lab.runner.run(lab.send((name, tensor) for name, tensor in model.state_dict().items() if left_out not in name))
    with pytest.raises(EngineError, match="mixture of weights"):
        lab.ask(lab.request())
    lab.serve(model)
    request = lab.request(6)
    (answer,) = lab.ask(request)
    assert lab.off(model, request, answer) < CLOSE


def test_cached_prompts_are_read_again_after_an_update(
    lab: Any, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = models(1), models(2)
    request = lab.request(7, length=140)
    lab.serve(old)
    lab.ask(request)
    lab.serve(new)
    (answer,) = lab.ask(request)
    assert lab.off(new, request, answer) < CLOSE

    lab.serve(old)
    lab.ask(request)
    control = lab.backend.engine.control

    async def without_reset(step: str, **arguments: Any) -> Any:
        return True if step == "reset_cache" else await control(step, **arguments)

    monkeypatch.setattr(lab.backend.engine, "control", without_reset)
    lab.serve(new)
    (stale,) = lab.ask(request)
    assert lab.off(new, request, stale) > FAR, "this test would not see a stale cache"


def test_a_trainer_that_stops_sending_is_reported_and_the_next_update_serves(lab: Any, models: Models) -> None:
    def broken() -> Any:
        named = list(models(1).state_dict().items())
        yield from named[:-3]
        raise RuntimeError("the trainer fell over")

    with pytest.raises(EngineError, match="the trainer stopped sending"):
        lab.runner.run(lab.send(broken(), size=1000))
    lab.serve(models(1))
    request = lab.request(8)
    (answer,) = lab.ask(request)
    assert lab.off(models(1), request, answer) < CLOSE


def test_weights_come_by_a_process_group_update_after_update(lab: Any, models: Models) -> None:
    import torch

    from turnwise_torch.broadcast import Hub

    hub = Hub("", torch.device("cpu"), 60.0)
    groups = set()
    for seed in (2, 1):
        assert (
            lab.runner.run(
                lab.send(models(seed).state_dict().items(), sender=hub.sender(lab.backend.receivers("process_group")))
            )
            == lab.version
        )
        request = lab.request(11)
        (answer,) = lab.ask(request)
        assert lab.off(models(seed), request, answer) < CLOSE
        groups.add(hub.name)
    assert len(groups) == 1, "the group is kept from update to update"
    hub.close()


def test_a_process_group_without_its_trainer_or_with_an_absent_partner_ends_in_one_error(
    lab: Any, models: Models
) -> None:
    import torch

    from turnwise_torch.broadcast import Hub

    hub = Hub("", torch.device("cpu"), 2.0)
    gone = hub.sender(1)
    gone.close()
    with pytest.raises(
        EngineError, match=r"^vLLM failed: weight update: the trainer's offer at 127\.0\.0\.1:\d+ is gone"
    ):
        lab.runner.run(lab.backend.receive(Offer("process_group", lab.version + 1, gone.payload)))
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"^vLLM failed: weight update: the trainer stopped sending"):
        lab.runner.run(lab.send(models(2).state_dict().items(), sender=hub.sender(2)))
    assert time.monotonic() - begun < 10
    with pytest.raises(EngineError, match="mixture of weights"):
        lab.ask(lab.request())
    lab.runner.run(lab.send(models(2).state_dict().items(), sender=hub.sender(1)))
    request = lab.request(12)
    (answer,) = lab.ask(request)
    assert lab.off(models(2), request, answer) < CLOSE
    hub.close()


def test_weights_of_a_folder_without_the_tied_head(lab: Any, models: Models) -> None:
    from safetensors import safe_open

    from turnwise_torch.models import load_causal_lm

    folder = lab.context.model
    with safe_open(str(folder / "model.safetensors"), framework="pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 - no mapping
    lab.serve(models(1))
    lab.version += 1
    assert (
        lab.runner.run(lab.backend.receive(Offer("safetensors", lab.version, {"folder": str(folder)}))) == lab.version
    )
    request = lab.request(9)
    (answer,) = lab.ask(request)
    assert lab.off(load_causal_lm(folder, "fp32", "eager"), request, answer) < CLOSE


def test_one_seed_gives_the_same_tokens_alone_and_among_others(lab: Any) -> None:
    requests = [lab.request(seed, prompt=seed, length=4 + seed, temperature=1.0) for seed in range(12)]
    together = lab.ask(*requests)
    for request, answer in list(zip(requests, together, strict=True))[:3]:
        (alone,) = lab.ask(request)
        assert alone.ids.tolist() == answer.ids.tolist()
    (other,) = lab.ask(lab.request(1000, prompt=0, length=4, temperature=1.0))
    assert other.ids.tolist() != together[0].ids.tolist()


def test_a_prompt_that_is_read_in_parts_gives_the_tokens_of_its_seed(make_lab: Callable[..., Any]) -> None:
    lab = make_lab({"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 16})
    try:
        requests = [lab.request(seed, prompt=seed, length=12, temperature=1.0) for seed in range(6)]
        together = lab.ask(*requests)  # 72 tokens of prompts, of which 16 are read at a time
        assert [answer.ids.tolist() for answer in together] == [
            lab.ask(request)[0].ids.tolist() for request in requests
        ]
    finally:
        lab.close()


def test_a_response_ends_at_the_chats_stop_token_a_stop_string_or_its_length(lab: Any, models: Models) -> None:
    lab.serve(models(1))
    stop_ids, chat = lab.context.chat.stop_ids, lab.context.chat
    answers = lab.ask(*[lab.request(seed, tokens=40) for seed in range(16)])
    for answer in answers:
        last = answer.ids[-1] in stop_ids
        assert not set(answer.ids[:-1].tolist()) & set(stop_ids)
        assert answer.finish == ("stop" if last else "length")
        assert last or len(answer.ids) == 40
    assert {answer.finish for answer in answers} == {"stop", "length"}

    seed, whole = next((seed, answer) for seed, answer in enumerate(answers) if len(answer.ids) > 8)
    word = chat.decode(whole.ids[4:5]).strip()
    for included in (True, False):
        (cut,) = lab.ask(lab.request(seed, tokens=40, stop_strings=(word,), include_stop_str_in_output=included))
        assert cut.finish == "stop"
        assert word in chat.decode(cut.ids), "the stop string's tokens stay"
        assert word not in chat.decode(cut.ids[:-1])
        assert cut.text == (chat.decode(cut.ids) if included else chat.decode(cut.ids).split(word)[0])
        assert cut.ids.tolist() == whole.ids[: len(cut.ids)].tolist()


def test_an_aborted_request_leaves_the_engine(lab: Any, endless: None) -> None:
    request, other = lab.request(tokens=240), lab.request(1, tokens=20)

    async def scene() -> tuple[Any, int]:
        task = asyncio.create_task(lab.backend.generate(request))
        beside = asyncio.create_task(lab.backend.generate(other))
        await asyncio.sleep(0.05)
        await lab.backend.abort(request)
        with pytest.raises(asyncio.CancelledError):
            await task
        await lab.backend.abort(request)
        answer = await beside
        await asyncio.sleep(0.1)
        # vLLM's own count: a request that was aborted shows nowhere else.
        return answer, lab.backend.engine._llm.get_num_unfinished_requests()

    answer, left = lab.runner.run(scene())
    assert (answer.finish, left) == ("length", 0)


def test_what_the_engine_must_not_see_is_refused_in_one_line(lab: Any, models: Models) -> None:
    lab.serve(models(1))
    for request, expected in (
        (
            Request(0, lab.request().args, 4, ids=np.array([3, 10**6], np.int32)),
            "token id 1000000 is outside the model's vocabulary",
        ),
        (lab.request(length=256), "a prompt of 256 tokens leaves no room for a response within 256 tokens"),
        (lab.request(temperature=0.001), "temperature 0.001 is below 0.01"),
        (Request(0, lab.request().args, 4), "takes token ids"),
    ):
        with pytest.raises(EngineError, match=expected):
            lab.ask(request)
    (answer,) = lab.ask(lab.request(length=250, tokens=100))
    assert len(answer.ids) <= 6, "the response ends where the sequence is full"


def test_a_head_size_without_a_kernel_is_reported_before_the_engine_starts(lab: Any, tmp_path: Any) -> None:
    from turnwise_vllm.backend import VllmBackend
    from turnwise_vllm.config import VllmConfig

    facts = '{"vocab_size": 32, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}'
    (tmp_path / "config.json").write_text(facts, encoding="utf-8")
    backend = VllmBackend(VllmConfig(), InferenceContext(tmp_path, lab.context.chat))
    with pytest.raises(ConfigError, match="no attention for heads of 16 numbers"):
        lab.runner.run(backend.generate(lab.request()))
    lab.runner.run(backend.close())


def test_the_environment_is_as_it_was_after_the_start(lab: Any) -> None:
    assert lab.backend.engine is not None
    assert not {"LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE"} & os.environ.keys()


def test_a_dead_engine_fails_every_request_at_once(lab: Any, endless: None) -> None:
    """The last test of this file: the engine is gone after it."""
    # vLLM names the process of its engine nowhere else.
    (process,) = lab.backend.engine._llm.engine_core.resources.engine_manager.processes

    async def scene() -> list[Any]:
        tasks = [asyncio.create_task(lab.backend.generate(lab.request(seed, tokens=240))) for seed in range(3)]
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    for expected in lab.runner.run(scene()):
        assert isinstance(expected, EngineLost)
        assert "vLLM's engine died" in str(expected)
    offer = Offer("safetensors", lab.version + 1, {"folder": str(lab.context.model)})
    for again in (lab.backend.generate(lab.request()), lab.backend.pause(), lab.backend.receive(offer)):
        with pytest.raises(EngineLost, match="vLLM's engine died"):
            lab.runner.run(asyncio.wait_for(again, 30))
