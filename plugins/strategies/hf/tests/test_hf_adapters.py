"""Adapters that come alone: over the base, by every transport, all or none of them, and refused in one line when they
do not fit."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Lora, LossChoice, Objective, Offer, TrainContext
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import EngineError
from turnwise_hf.backend import HfBackend
from turnwise_hf.config import HfConfig
from turnwise_torch.models import load_causal_lm
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import Sender, buckets

pytest.importorskip("peft", reason="adapters need PEFT: pip install 'turnwise-torch[lora]'")
T = TypeVar("T")
LORA = Lora(rank=4, alpha=8, target="all-linear", sync="adapter")
ALONE = ("shared_memory", "process_group", "safetensors")
REQUEST = Request(0, GeneratingArgs(), 5, (0,), ids=int32((1, 12, 13, 14, 2)))


@pytest.fixture
def trainer(folder: Path) -> Iterator[Callable[..., TorchStrategy]]:
    """`trainer(seed, **lora)`: the strategy `torch` with adapters that are far from nothing."""
    built: list[TorchStrategy] = []

    def make(seed: int = 0, **changes: Any) -> TorchStrategy:
        objective = Objective(LossChoice("ppo"))
        built.append(
            TorchStrategy(
                None,
                TrainContext(folder, "actor_train", dtype="fp32", objective=objective, lora=evolve(LORA, **changes)),
            )
        )
        move(built[-1], seed)
        return built[-1]

    yield make
    for strategy in built:
        strategy.close()


@torch.no_grad()
def move(strategy: TorchStrategy, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in strategy.model.parameters():
        if parameter.requires_grad:
            parameter.normal_(0, 0.3, generator=draw)


def with_backend(
    folder: Path, work: Callable[[HfBackend], Awaitable[T]], lora: Lora | None = LORA, **context: Any
) -> T:
    """`work(backend)` on an event loop of its own; nothing may hang."""

    async def main() -> T:
        backend = HfBackend(
            HfConfig(),
            InferenceContext(
                folder,
                None,
                lora=lora,
                **{"dtype": "fp32", "sequence_length": 64, "weight_sync_timeout": 20.0, **context},
            ),
        )
        try:
            return await asyncio.wait_for(work(backend), 60)
        finally:
            await backend.close()

    return asyncio.run(main())


async def sync(strategy: TorchStrategy, backend: HfBackend, transport: str, version: int) -> Any:
    """As the loop does; the config of the offer's adapters."""
    offer = strategy.offer(transport, version)
    assert (await asyncio.gather(asyncio.to_thread(strategy.send, offer), backend.receive(offer)))[1] == version
    return offer.adapter


def check(generation: Generation, model: Any, version: int, atol: float = 1e-5) -> None:
    """The log-probs are those of a whole forward pass of `model`."""
    assert generation.ids is not None
    assert generation.versions is not None
    assert REQUEST.ids is not None
    ids = torch.tensor([*REQUEST.ids.tolist(), *generation.ids.tolist()])
    with torch.no_grad():
        every = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1].double(), -1)
    expected = every.gather(1, ids[1:, None])[len(REQUEST.ids) - 1 :, 0].numpy()
    np.testing.assert_allclose(generation.logprobs, expected, atol=atol)  # type: ignore[arg-type]
    assert set(generation.versions.tolist()) == {version}


@pytest.mark.parametrize("transport", ALONE)
def test_the_base_serves_first_then_every_update_by_its_adapters(
    folder: Path, trainer: Callable[..., TorchStrategy], transport: str
) -> None:
    strategy, places = trainer(), []

    async def work(backend: HfBackend) -> list[Generation]:
        answers = [await backend.generate(REQUEST)]
        for version in (1, 2):
            move(strategy, version)
            await sync(strategy, backend, transport, version)
            # Its own copy of the model: where its weights lie shows nowhere else.
            assert backend._own is not None
            places.append([parameter.data_ptr() for parameter in backend._own.parameters()])
            answers.append(await backend.generate(REQUEST))
            models.append(copy.deepcopy(strategy.model))
        await backend.sleep()
        await backend.wake("weights")
        await backend.wake("cache")
        assert np.array_equal((await backend.generate(REQUEST)).logprobs, answers[-1].logprobs)  # type: ignore[arg-type]
        return answers

    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)]
    for version, (answer, model) in enumerate(zip(with_backend(folder, work), models, strict=True)):
        check(answer, model, version)
    assert places[0] == places[1]


def test_another_dtype_than_the_trainers_serves_nearly_the_same(
    folder: Path, trainer: Callable[..., TorchStrategy]
) -> None:
    strategy = trainer()

    async def work(backend: HfBackend) -> Generation:
        await sync(strategy, backend, "shared_memory", 1)
        # As above: a dtype shows in log-probs only as noise.
        assert {str(parameter.dtype) for parameter in backend._own.parameters()} == {"torch.bfloat16"}  # type: ignore[union-attr]
        return await backend.generate(REQUEST)

    check(with_backend(folder, work, dtype="bf16"), strategy.model, 1, atol=0.3)


def test_adapters_that_arrive_in_the_middle_sample_the_rest(
    folder: Path, trainer: Callable[..., TorchStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, reached, go = trainer(), threading.Event(), threading.Event()
    from turnwise_hf import decoding

    original = decoding.decode

    def watched(*arguments: Any) -> Any:
        reached.set()
        go.wait(30)
        return original(*arguments)

    monkeypatch.setattr(decoding, "decode", watched)

    async def work(backend: HfBackend) -> Generation:
        task = asyncio.create_task(backend.generate(REQUEST))
        await asyncio.to_thread(reached.wait, 30)
        updating = asyncio.create_task(sync(strategy, backend, "shared_memory", 1))
        await asyncio.sleep(0.05)
        go.set()
        await updating
        return await task

    generation = with_backend(folder, work)
    assert generation.versions is not None
    assert sorted(set(generation.versions.tolist())) == [0, 1]


def test_the_trainers_own_module_is_left_alone_by_what_comes_after_it(
    folder: Path, trainer: Callable[..., TorchStrategy]
) -> None:
    strategy, other = trainer(), trainer(seed=5)
    held = {name: parameter.detach().clone() for name, parameter in strategy.model.named_parameters()}

    async def work(backend: HfBackend) -> list[Generation]:
        answers = []
        for number, (one, transport) in enumerate(
            [(other, "shared_memory"), (strategy, "shared"), (other, "safetensors")], 1
        ):
            await sync(one, backend, transport, number)
            answers.append(await backend.generate(REQUEST))
        return answers

    first, second, third = with_backend(folder, work)
    check(first, other.model, 1)
    check(second, strategy.model, 2)
    check(third, other.model, 3)
    assert all(torch.equal(held[name], parameter) for name, parameter in strategy.model.named_parameters())


def test_the_random_state_of_the_process_is_the_trainers(folder: Path, trainer: Callable[..., TorchStrategy]) -> None:
    strategy = trainer()

    async def work(backend: HfBackend) -> None:
        before = torch.get_rng_state()
        await sync(strategy, backend, "safetensors", 1)
        assert torch.equal(torch.get_rng_state(), before)

    with_backend(folder, work)


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.lora_A.weight"] = tensors.pop(min(tensors))


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(tensors)]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)] = torch.ones(3)


FIRST = r"'base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A\.weight'"


@pytest.mark.parametrize("transport", ["shared_memory", "safetensors"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            rename,
            r"hold 1 names that the model's do not have, such as 'base_model\.model\.model\.norm\.lora_A\.weight'",
        ),
        (drop, rf"lack 1 of the model's tensors, such as {FIRST}"),
        (reshape, rf"have {FIRST} of shape \(3,\), the model's is \(4, 96\)"),
    ],
)
def test_wrong_adapters_are_one_line_and_the_last_ones_serve_on(
    folder: Path,
    trainer: Callable[..., TorchStrategy],
    transport: str,
    harm: Callable[[dict[str, torch.Tensor]], None],
    message: str,
) -> None:
    strategy = trainer()

    async def work(backend: HfBackend) -> Generation:
        adapter = await sync(strategy, backend, "safetensors", 1)
        move(strategy, 9)
        place = Path(strategy.offer("safetensors", 2).payload["folder"]) / "adapter_model.safetensors"
        tensors = load_file(place)
        harm(tensors)
        save_file(tensors, place)
        folder_of_it = Offer(transport, 2, {"folder": str(place.parent)}, adapter)
        with pytest.raises(EngineError, match=message) as caught:
            await (backend.receive(folder_of_it) if transport == "safetensors" else stream(backend, tensors, adapter))
        assert "\n" not in str(caught.value)
        move(strategy, 0)
        return await backend.generate(REQUEST)

    check(with_backend(folder, work), strategy.model, 1)


async def stream(backend: HfBackend, tensors: Mapping[str, torch.Tensor], adapter: Any, stop: bool = False) -> None:
    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()
        if stop:
            raise ValueError("no memory for the rest")

    sender = Sender(1, 10)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(parts(), 100)))
    try:
        await backend.receive(Offer("shared_memory", 2, sender.payload, adapter))
    finally:
        await asyncio.gather(sending, return_exceptions=True)


def test_an_update_that_breaks_off_leaves_the_last_adapters(
    folder: Path, trainer: Callable[..., TorchStrategy]
) -> None:
    strategy = trainer()

    async def work(backend: HfBackend) -> Generation:
        adapter = await sync(strategy, backend, "shared_memory", 1)
        move(strategy, 9)
        tensors = load_file(Path(strategy.offer("safetensors", 2).payload["folder"]) / "adapter_model.safetensors")
        with pytest.raises(EngineError, match="weight update"):
            await stream(backend, tensors, adapter, stop=True)
        move(strategy, 0)
        return await backend.generate(REQUEST)

    check(with_backend(folder, work), strategy.model, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, r"\(r: 4, now 8\)\. Fix: start the backend anew"),
        ({"target": "q_proj"}, r"\(target_modules: \[.*now \["),
    ],
)
def test_adapters_of_another_form_than_the_first_are_refused(
    folder: Path, trainer: Callable[..., TorchStrategy], changes: dict[str, Any], message: str
) -> None:
    one, other = trainer(), trainer(**changes)

    async def work(backend: HfBackend) -> Generation:
        await sync(one, backend, "safetensors", 1)
        with pytest.raises(EngineError, match=message) as caught:
            await backend.receive(other.offer("safetensors", 2))
        assert "\n" not in str(caught.value)
        return await backend.generate(REQUEST)

    check(with_backend(folder, work), one.model, 1)


def test_targets_that_the_model_lacks_are_refused_and_the_base_serves_on(
    folder: Path, trainer: Callable[..., TorchStrategy]
) -> None:
    offer = trainer().offer("safetensors", 1)
    assert offer.adapter is not None

    async def work(backend: HfBackend) -> Generation:
        with pytest.raises(
            EngineError,
            match=r"the trainer's adapters do not fit the model: Target modules .*no_such.* Fix: one pretrain for both",
        ):
            await backend.receive(evolve(offer, adapter={**offer.adapter, "target_modules": ["no_such"]}))  # type: ignore[dict-item]
        return await backend.generate(REQUEST)

    check(with_backend(folder, work), load_causal_lm(folder, "fp32", "sdpa"), 0)


@pytest.mark.parametrize("alone", [True, False])
def test_whole_weights_for_adapters_and_adapters_for_whole_weights_are_refused(
    folder: Path, trainer: Callable[..., TorchStrategy], alone: bool
) -> None:
    offer = trainer(sync="merged" if alone else "adapter").offer("safetensors", 1)
    message = "the trainer offers whole weights, this backend was built for adapters alone"

    async def work(backend: HfBackend) -> None:
        expected = message if alone else "the trainer offers adapters alone, this backend was built for whole weights"
        with pytest.raises(EngineError, match=f"{expected}. Fix: one actor_train.model_args.lora_sync for both"):
            await backend.receive(offer)

    with_backend(folder, work, lora=LORA if alone else None)


def test_without_peft_the_machine_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("turnwise_hf.backend.importlib.util.find_spec", lambda name: None)
    (problem,) = HfBackend.check(HfConfig(), InferenceContext(folder, None, lora=LORA))
    assert problem.machine
    assert str(problem).startswith(
        "$.actor_train.model_args.lora_sync: adapters alone need the package peft in the hf backend. Fix: pip install "
    )
    assert HfBackend.check(HfConfig(), InferenceContext(folder, None)) == []
