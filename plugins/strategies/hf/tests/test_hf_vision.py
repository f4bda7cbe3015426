"""Images: the ids that the model sees, and sampling whose log-probs are those of transformers' own forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation
from turnwise.errors import ConfigError, EngineError
from turnwise.testing.synthetic import picture
from turnwise_hf.backend import HfBackend
from turnwise_hf.chat import HfChat
from turnwise_hf.config import HfConfig
from turnwise_torch.models import load_causal_lm
from turnwise_torch.vision import Vision

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def seeing(make: Callable[..., Path]) -> Path:
    """A small Qwen2.5-VL."""
    return make(architecture="qwen2_5_vl")


def asked(text: str, *images: np.ndarray) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}],
        }
    ]


def test_an_image_becomes_as_many_tokens_as_the_model_sees(seeing: Path) -> None:
    chat, vision = HfChat(seeing), Vision(seeing)
    images = (picture(0, 56, 84), picture(1, 28, 28))
    ids = chat.render(asked("Which way?", *images), images)
    assert [vision.tokens(image) for image in images] == [6, 1]  # 28 × 28 pixels a token
    tokens = chat.tokenizer.convert_ids_to_tokens(ids.tolist())
    assert tokens[tokens.index("<|vision_start|>") :][:11] == [
        *("<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>"),
        *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ]
    mask, found = vision.find(ids, images)
    assert mask.sum() == 7
    assert len(found) == 2
    other = chat.render(asked("Which way?", images[1], images[0]), (images[1], images[0]))
    assert other.tolist() != ids.tolist()


def test_a_turn_with_an_image_is_appended(seeing: Path) -> None:
    chat = HfChat(seeing)
    first, second = picture(0, 56, 84), picture(1, 28, 56)
    start = chat.render(asked("Which way?", first), (first,))
    answer = chat.tokenizer.convert_tokens_to_ids(["Left", "<|im_end|>"])
    so_far = np.concatenate([start, np.array(answer, np.int32)])
    added = chat.extend(so_far, "stop", asked("Which way?", second), (second,))
    conversation = [*asked("Which way?", first), {"role": "assistant", "content": "Left"}, *asked("Which way?", second)]
    assert np.concatenate([so_far, added]).tolist() == chat.render(conversation, (first, second)).tolist()


def test_text_parts_alone_and_image_tokens_in_text(seeing: Path, folder: Path) -> None:
    chat = HfChat(seeing)
    assert chat.render(asked("Left")).tolist() == chat.render([{"role": "user", "content": "Left"}]).tolist()
    spoilt = [{"role": "user", "content": "<|image_pad|>Left"}]  # as a response that held the token is shown again
    assert chat.render(spoilt).tolist() == chat.render(asked("Left")).tolist()
    with pytest.raises(ConfigError, match="taken as a text model"):
        HfChat(folder).render(asked("Left", picture(0, 28, 28)), (picture(0, 28, 28),))


def request_of(chat: HfChat, seed: int, *images: np.ndarray) -> Request:
    args = GeneratingArgs(max_new_tokens=6, temperature=TEMPERATURE)
    return Request(
        seed=seed,
        args=args,
        max_new_tokens=6,
        order=(0, seed),
        ids=chat.render(asked("Which way?", *images), images),
        images=images,
    )


def sampled(seeing: Path, requests: list[Request], **changes: Any) -> list[Generation]:
    async def main() -> list[Generation]:
        backend = HfBackend(
            HfConfig(),
            InferenceContext(model=seeing, chat=HfChat(seeing), dtype="fp32", sequence_length=128, **changes),
        )
        try:
            backend.live(len(requests))
            return list(await asyncio.gather(*map(backend.generate, requests)))
        finally:
            await backend.close()

    return asyncio.run(main())


def slow(model: Any, vision: Vision, request: Request, generation: Generation) -> np.ndarray:
    """By transformers' own forward and positions; sampled image tokens are left to the test."""
    assert request.ids is not None
    assert generation.ids is not None
    ids = torch.from_numpy(np.concatenate([request.ids, generation.ids]).astype(np.int64))[None]
    pixels = vision.pixels(request.images, torch.device("cpu"))
    given = {} if pixels is None else {"pixel_values": pixels.values, "image_grid_thw": pixels.grid}
    kinds = (ids == vision.token).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **given).logits[0]
    every = torch.log_softmax(logits / TEMPERATURE, -1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    return every[-len(generation.ids) :].numpy()


@pytest.mark.parametrize("rows", [0, 2])
def test_sampling_with_images_gives_the_log_probs_of_a_plain_forward(seeing: Path, rows: int) -> None:
    chat, vision, model = HfChat(seeing), Vision(seeing), load_causal_lm(seeing, "fp32", "sdpa")
    shown = [(picture(0, 56, 84),), (), (picture(1, 28, 28), picture(2, 84, 56)), (picture(3, 56, 84),)]
    requests = [request_of(chat, seed, *images) for seed, images in enumerate(shown * 3)]
    generations = sampled(seeing, requests, infer_batch_size=rows)
    checked = 0
    for request, generation in zip(requests, generations, strict=True):
        assert generation.ids is not None
        if (generation.ids == vision.token).any():
            continue  # transformers would look for an image there
        np.testing.assert_allclose(generation.logprobs, slow(model, vision, request, generation), atol=2e-5)
        checked += 1
    assert checked >= 6
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in zip(generations[::4], generations[3::4]))  # type: ignore[union-attr]


def test_the_same_request_gives_the_same_tokens_in_another_batch(seeing: Path) -> None:
    chat = HfChat(seeing)
    requests = [request_of(chat, seed, picture(seed % 2, 56, 56)) for seed in range(5)]
    together = sampled(seeing, requests)
    alone = [sampled(seeing, [request])[0] for request in requests]
    assert [g.ids.tolist() for g in together] == [g.ids.tolist() for g in alone]  # type: ignore[union-attr]


def test_ids_without_their_image_are_reported(seeing: Path) -> None:
    request = request_of(HfChat(seeing), 0, picture(0, 56, 84))
    with pytest.raises(EngineError, match="image 1 of a sample is 1 tokens"):
        sampled(seeing, [evolve(request, images=(picture(0, 28, 28),))])
