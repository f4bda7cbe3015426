"""Images in the real engine: log-probs are those of transformers' own forward, before and after a weight update."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from sglang_served import ROUNDS, longest_first, under_way

from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, EnvironmentFailure
from turnwise.testing.synthetic import picture
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import Sender, buckets
from turnwise_torch.vision import Vision

pytestmark = [pytest.mark.engines]
LONGEST = 240.0
LIMIT = 8


@functools.cache
def seeing(place: Path, seed: int) -> Path:
    """A small Qwen2.5-VL, wide enough that another image or weight shows in every log-prob."""
    source = pytest.importorskip("turnwise_hf.source", reason="the model and its chat come from turnwise-hf")
    facts = {
        "architecture": "qwen2_5_vl",
        "hidden_size": 64,
        "num_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
    }
    texts = [
        {"role": "user", "content": text} for text in ("Which way?", "Left", "Down", "Right", "Up", "one two three a b")
    ]
    folder: Path = source.HfModelSource(None, ModelSourceContext(cache=place, texts=lambda: texts)).prepare(
        {"recipe": {**facts, "seed": seed}}
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    place = tmp_path_factory.mktemp("seeing")
    return lambda seed: seeing(place, seed)


@pytest.fixture(scope="module")
def chat(folders: Any) -> Any:
    from turnwise_hf.chat import HfChat

    return HfChat(folders(0))


@pytest.fixture(scope="module")
def backend(run: Any, folders: Any, chat: Any) -> Iterator[SglangBackend]:
    async def build() -> SglangBackend:
        config = SglangConfig(python=fixtures.interpreter(), start_timeout=LONGEST)
        return SglangBackend(config, fixtures.context(model=folders(0), chat=chat))

    built = run(build())
    yield built
    run(built.close())


def ask(chat: Any, seed: int, *images: np.ndarray, limit: int = LIMIT) -> Request:
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "Which way?"}]
    ids = chat.render([{"role": "user", "content": content}], images)
    return Request(seed, GeneratingArgs(max_new_tokens=limit, temperature=0.7), limit, (seed,), ids=ids, images=images)


def differences(request: Request, answer: Generation, folder: Path) -> np.ndarray:
    """|log-prob − that of transformers' own forward and positions| for every token."""
    assert request.ids is not None and answer.ids is not None and answer.logprobs is not None
    vision = Vision(folder)
    ids = torch.from_numpy(np.concatenate([request.ids, answer.ids]).astype(np.int64))[None]
    pixels = vision.pixels(request.images, torch.device("cpu"))
    given = {} if pixels is None else {"pixel_values": pixels.values, "image_grid_thw": pixels.grid}
    with torch.no_grad():
        model = load_causal_lm(folder, "fp32", "sdpa")
        logits = model(input_ids=ids, mm_token_type_ids=(ids == vision.token).int(), use_cache=False, **given).logits[0]
    expected = torch.log_softmax(logits / 0.7, -1)[:-1].gather(-1, ids[0, 1:, None])[-len(answer.ids) :, 0]
    return np.abs(answer.logprobs - expected.numpy())


def judged(answer: Generation, token: int) -> Generation:
    """The answer up to the first image token that the model sampled, where transformers would look for an image."""
    assert answer.ids is not None and answer.logprobs is not None
    end = int(np.argmax(np.append(answer.ids, token) == token))
    return evolve(answer, ids=answer.ids[:end], logprobs=answer.logprobs[:end], versions=answer.versions[:end])


def parity(backend: SglangBackend, run: Any, chat: Any, folder: Path, other: Path) -> None:
    async def scene() -> list[Generation]:
        return list(await asyncio.gather(*map(backend.generate, requests)))

    # The third is no multiple of a patch: it is scaled. The fifth is the first again: its prompt may be in the cache.
    shown = [
        (picture(0, 56, 84),),
        (),
        (picture(1, 50, 90),),
        (picture(2, 28, 28), picture(3, 84, 56)),
        (picture(0, 56, 84),),
    ]
    requests = [ask(chat, seed, *images) for seed, images in enumerate(shown * 2)]
    checked = 0
    for request, whole in zip(requests, run(scene()), strict=True):
        answer = judged(whole, Vision(folder).token)
        if not len(answer.ids):
            continue
        assert differences(request, answer, folder).max() < 1e-4
        assert differences(request, answer, other).max() > 0.1
        checked += bool(request.images)
    assert checked >= 4


def test_log_probs_with_images_are_the_models_before_and_after_updates(
    backend: SglangBackend, run: Any, chat: Any, folders: Any
) -> None:
    parity(backend, run, chat, folders(0), folders(1))
    assert run(backend.receive(Offer("safetensors", 1, {"folder": str(folders(1))}))) == 1
    parity(backend, run, chat, folders(1), folders(0))

    async def streamed() -> int:
        sender = Sender(1, LONGEST)
        offered = list(buckets(load_causal_lm(folders(0), "fp32", "sdpa").state_dict().items(), 1 << 14))
        sending = asyncio.create_task(asyncio.to_thread(sender.send, offered))
        try:
            return await backend.receive(Offer("shared_memory", 2, sender.payload))
        finally:
            await asyncio.gather(sending, return_exceptions=True)

    assert run(streamed()) == 2
    parity(backend, run, chat, folders(0), folders(1))


def test_an_update_in_mid_generation_computes_the_images_anew(
    backend: SglangBackend, run: Any, chat: Any, folders: Any
) -> None:
    token = Vision(folders(0)).token

    async def scene(version: int) -> tuple[list[Request], list[Generation]]:
        await backend.receive(Offer("safetensors", version, {"folder": str(folders(0))}))
        requests = [ask(chat, seed, picture(seed, 56, 84), limit=300) for seed in range(24)]
        tasks = await under_way(backend, requests := list(await longest_first(backend, requests)))
        await backend.receive(Offer("safetensors", version + 1, {"folder": str(folders(1))}))
        return requests, list(await asyncio.gather(*tasks))

    for version in range(3, 3 + 2 * ROUNDS, 2):
        answers = [(request, judged(answer, token)) for request, answer in zip(*run(scene(version)), strict=True)]
        if cut := [(r, a) for r, a in answers if len(set(a.versions.tolist())) == 2]:
            break
    assert cut
    for request, answer in cut:
        for of, model in ((version, 0), (version + 1, 1)):
            assert differences(request, answer, folders(model))[answer.versions == of].max() < 1e-4


def test_a_prompt_that_does_not_fit_its_images_is_refused(backend: SglangBackend, run: Any, chat: Any) -> None:
    image = picture(0, 56, 84)
    good = ask(chat, 0, image)
    sampled = np.append(good.ids, np.int32(Vision(chat.folder).token))  # type: ignore[arg-type]
    cases: list[Any] = [
        (good.ids, (image, image), EngineError, "holds 1 of its 2 images"),
        (good.ids, (picture(0, 28, 28),), EngineError, "does not fit its images"),
        (sampled, (image,), EnvironmentFailure, "an image token that the model sampled"),
    ]
    for ids, images, kind, message in cases:
        with pytest.raises(kind, match=message):
            run(backend.generate(Request(0, good.args, LIMIT, ids=ids, images=images)))
