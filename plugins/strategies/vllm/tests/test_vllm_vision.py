"""Images: vLLM sees what the trainer sees, so log-probs are those of transformers' own forward, before and after a
weight update."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import CLOSE, WARNS

from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.errors import EngineError
from turnwise.testing.synthetic import picture

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300), pytest.mark.usefixtures("empty_cache"), WARNS]
RECIPE = {
    "architecture": "qwen2_5_vl",
    "hidden_size": 64,
    "num_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
}


class Seeing:
    """A small Qwen2.5-VL in a server of vLLM's, and the trainer's model."""

    def __init__(self, place: Path, options: dict[str, Any]) -> None:
        from turnwise_hf.source import HfModelSource
        from turnwise_torch.models import load_causal_lm
        from turnwise_torch.vision import Vision
        from turnwise_vllm.backend import VllmBackend
        from turnwise_vllm.config import VllmConfig

        source = HfModelSource(
            None, ModelSourceContext(cache=place, texts=lambda: [{"role": "user", "content": "Which way? Left Right"}])
        )
        self.folder = source.prepare({"recipe": RECIPE})
        self.chat, self.vision = source.chat(self.folder), Vision(self.folder)
        self.context = InferenceContext(
            self.folder, self.chat, dtype="fp32", sequence_length=512, weight_sync_timeout=60.0
        )
        self.backend = VllmBackend(VllmConfig(**options), self.context)
        self.model = load_causal_lm(self.folder, "fp32", "sdpa")
        self.runner = asyncio.Runner()

    def request(self, seed: int, temperature: float, *images: np.ndarray, tokens: int = 6) -> Request:
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "Which way?"}]
        ids = self.chat.render([{"role": "user", "content": parts}], images)
        return Request(seed, GeneratingArgs(tokens, temperature), tokens, (0, seed), ids=ids, images=images)

    def ask(self, requests: list[Request]) -> list[Any]:
        async def scene() -> list[Any]:
            return await asyncio.gather(*[self.backend.generate(request) for request in requests])

        return self.runner.run(scene())

    def off(self, request: Request, answer: Any, chosen: slice | np.ndarray = slice(None)) -> float:
        """How far its log-probs are from transformers' own forward with its own positions, at most, over the `chosen`
        tokens."""
        import torch

        ids = torch.from_numpy(np.concatenate([request.ids, answer.ids]).astype(np.int64))[None]
        pixels = self.vision.pixels(request.images, torch.device("cpu"))
        given = {} if pixels is None else {"pixel_values": pixels.values, "image_grid_thw": pixels.grid}
        with torch.no_grad():
            logits = self.model(
                input_ids=ids, mm_token_type_ids=(ids == self.vision.token).int(), use_cache=False, **given
            ).logits[0]
        every = (
            torch.log_softmax(logits / (request.args.temperature or 1.0), -1)[:-1]
            .gather(-1, ids[0, 1:, None])
            .squeeze(-1)
        )
        return float(np.abs(answer.logprobs - every[-len(answer.ids) :].numpy())[chosen].max())

    def check(self, version: int) -> None:
        # 64 × 96 and 40 × 50 pixels are resized: by another processor than the trainer's they would be other pixels.
        shown = [
            (picture(0, 56, 84),),
            (),
            (picture(1, 28, 28), picture(2, 84, 56)),
            (picture(3, 64, 96), picture(4, 40, 50)),
        ]
        requests = [self.request(seed, t, *images) for t in (0.7, 1.0) for seed, images in enumerate(shown * 2)]
        checked = []
        for request, answer in zip(requests, self.ask(requests), strict=True):
            assert set(answer.versions.tolist()) == {version}
            if not (answer.ids == self.vision.token).any():  # transformers would look for an image there
                assert self.off(request, answer) < CLOSE
                checked.append(len(request.images))
        assert {0, 1, 2} <= set(checked)


@pytest.fixture(scope="module")
def seeing(
    tmp_path_factory: pytest.TempPathFactory, vision_options: dict[str, Any], empty_cache: None
) -> Iterator[Seeing]:
    """The server, started once."""
    seeing = Seeing(tmp_path_factory.mktemp("seeing"), vision_options)
    yield seeing
    seeing.runner.run(seeing.backend.close())
    seeing.runner.close()


def test_log_probs_with_images_are_those_of_transformers(seeing: Seeing) -> None:
    seeing.check(0)


def test_an_update_reaches_the_vision_tower_and_cached_images_are_seen_anew(
    seeing: Seeing, stream: Callable[..., Any]
) -> None:
    import torch

    generator = torch.Generator().manual_seed(3)
    request = seeing.request(0, 1.0, picture(0, 56, 84))
    with torch.no_grad():
        for name, parameter in seeing.model.named_parameters():
            if "visual" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    (stale,) = seeing.ask([request])
    assert seeing.off(request, stale) > 1e-3, "the vision tower does not matter to this model"
    with torch.no_grad():
        for name, parameter in seeing.model.named_parameters():
            if "visual" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    seeing.runner.run(stream(seeing.backend, seeing.model.state_dict().items(), 1))
    seeing.check(1)


def test_images_are_seen_anew_by_responses_that_go_on(
    seeing: Seeing, stream: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(seeing.chat, "stop_ids", ())
    old = {name: tensor.clone() for name, tensor in seeing.model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    new = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) if "visual" in name else tensor
        for name, tensor in old.items()
    }
    weights = (old, new)
    # Greedy: of so many tokens that are drawn, one would be an image's, where transformers would look for an image.
    asked = [seeing.request(seed, 0.0, picture(seed, 56, 84), picture(9, 28, 28), tokens=400) for seed in range(8)]

    async def scene() -> list[Any]:
        await stream(seeing.backend, old.items(), 10)
        tasks = [asyncio.create_task(seeing.backend.generate(request)) for request in asked]
        version = 10
        while not all(task.done() for task in tasks):
            # However fast it samples, it cannot end without meeting weights: they come as long as it goes on.
            version += 1
            await stream(seeing.backend, weights[version % 2].items(), version)
        return await asyncio.gather(*tasks)

    answers = seeing.runner.run(scene())
    assert max(len(set(answer.versions.tolist())) for answer in answers) > 2
    checked = 0
    for place, state in enumerate(weights):
        seeing.model.load_state_dict(state)
        for request, answer in zip(asked, answers, strict=True):
            mine = answer.versions % 2 == place
            if mine.any() and not (answer.ids == seeing.vision.token).any():
                assert seeing.off(request, answer, mine) < CLOSE
                checked += 1
    assert checked > 1
    seeing.model.load_state_dict(old)


def test_ids_that_do_not_fit_the_images_are_reported(seeing: Seeing) -> None:
    from attrs import evolve

    request = seeing.request(0, 1.0, picture(0, 56, 84))
    with pytest.raises(EngineError, match="the prompt does not fit its images: image 1 of a sample is 1 tokens"):
        seeing.ask([evolve(request, images=(picture(0, 28, 28),))])
    with pytest.raises(EngineError, match="the prompt holds 1 of its 2 images"):
        seeing.ask([evolve(request, images=(*request.images, picture(0, 28, 28)))])


def test_all_this_with_the_engine_in_the_runs_process(vision_options: dict[str, Any]) -> None:
    if not vision_options:
        pytest.skip("the tests above ran so")
    tests, path = Path(__file__), os.pathsep.join((*vision_options["python_path"], os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(tests.with_name("vision_in_process.py")), str(tests)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.split()[0].strip(".") == "s", "one test alone is not run there: this one"
