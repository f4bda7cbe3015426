"""Images in training: log-probs and gradients are those of transformers' own forward, whatever the micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.errors import ConfigError, TrainerError
from turnwise.testing.synthetic import picture
from turnwise_torch.config import TorchConfig
from turnwise_torch.fixtures import tiny_model, tiny_vision_model
from turnwise_torch.models import load_causal_lm
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.vision import Vision

START, IMAGE, END = 52, 50, 53
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def context(folder: Path) -> TrainContext:
    loss = Objective(LossChoice("vanilla"))
    return TrainContext(
        model=folder,
        role="actor_train",
        dtype="fp32",
        temperature=TEMPERATURE,
        objective=loss,
        per_device_train_batch_size=2,
    )


def make_rows(vision: Vision) -> Rows:
    """Two pictures of different sizes in one sample, none in the second, one in the third, whose last picture nobody
    predicts from."""
    images = ((picture(0, 64, 96), picture(1, 40, 40)), (), (picture(2, 56, 84), picture(3, 30, 30)))

    def run(image: np.ndarray) -> list[int]:
        return [START, *[IMAGE] * vision.tokens(image), END]

    samples = [
        ([1, 2, *run(images[0][0]), 3], [4, 5], [*run(images[0][1]), 6], [7, 8]),
        ([9, 10, 11], [12, 13, 14], [], []),
        ([3, *run(images[2][0]), 4], [5], run(images[2][1]), []),
    ]
    ids = [token for sample in samples for part in sample for token in part]
    mask = [bool(number % 2) for sample in samples for number, part in enumerate(sample) for _ in part]
    offsets = np.concatenate([[0], np.cumsum([sum(map(len, sample)) for sample in samples])]).astype(np.int64)
    count = sum(mask)
    columns = {
        "coef": np.full(count, 1 / count), "weight": np.ones(count), "advantages": np.linspace(-1, 1, count), "old_log_probs": np.full(count, np.nan),
        "sample": np.zeros(count, np.int64), "turn": np.zeros(count, np.int64), "trajectory": np.zeros(count, np.int64),
    }  # fmt: skip
    return Rows(np.array(ids, np.int32), offsets, np.array(mask), columns, images)


def slow_log_probs(model: torch.nn.Module, vision: Vision, rows: Rows) -> torch.Tensor:
    """Sample by sample, by transformers' own forward with its own positions."""
    parts = []
    for s in range(len(rows)):
        at = slice(rows.offsets[s], rows.offsets[s + 1])
        ids = torch.from_numpy(rows.input_ids[at].astype(np.int64))[None]
        pixels = vision.pixels(rows.images[s], torch.device("cpu"))
        given = {} if pixels is None else {"pixel_values": pixels.values, "image_grid_thw": pixels.grid}
        logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False, **given).logits[0]
        every = torch.log_softmax(logits / TEMPERATURE, -1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        parts.append(every[torch.from_numpy(rows.response_mask[at][1:])])
    return torch.cat(parts)


def test_log_probs_with_images_are_those_of_transformers(context: TrainContext, folder: Path) -> None:
    strategy, vision = TorchStrategy(TorchConfig(), context), Vision(folder)
    rows = make_rows(vision)
    expected = slow_log_probs(load_causal_lm(folder, "fp32", "sdpa"), vision, rows).detach().numpy()
    np.testing.assert_allclose(strategy.logprobs(rows), expected, atol=2e-6)
    strategy.close()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_update_moves_text_and_vision_as_one_backward_pass_over_all_samples_does(
    context: TrainContext, folder: Path, size: int, checkpointing: bool
) -> None:
    strategy = TorchStrategy(
        TorchConfig(),
        evolve(context, per_device_train_batch_size=size, gradient_checkpointing=checkpointing, max_grad_norm=0.0),
    )
    vision = Vision(folder)
    rows = make_rows(vision)
    model = load_causal_lm(folder, "fp32", "sdpa")
    loss = -(
        torch.from_numpy(rows.columns["coef"] * rows.columns["advantages"]) * slow_log_probs(model, vision, rows)
    ).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    before = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    result = strategy.update(Update(rows, lr=1e-3))
    expected = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
    assert result.grad_norm == pytest.approx(float(expected), rel=1e-4)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        moved = (strategy.model.get_parameter(name) - before[name]).detach()  # Adam's first step: −lr·sign(gradient)
        clear = parameter.grad.abs() > 1e-5
        torch.testing.assert_close(moved[clear], -1e-3 * parameter.grad[clear].sign(), rtol=2e-2, atol=1e-6)
    assert any("visual" in name and p.grad is not None for name, p in model.named_parameters())
    strategy.close()


def test_a_critic_reads_images_too(context: TrainContext, folder: Path) -> None:
    strategy = TorchStrategy(
        TorchConfig(), evolve(context, role="critic", head="value", objective=Objective(LossChoice("vanilla")))
    )
    assert strategy.values(make_rows(Vision(folder))).tolist() == [0.0] * 8
    strategy.close()


def test_an_image_token_that_was_sampled_is_text(context: TrainContext, folder: Path) -> None:
    strategy, vision = TorchStrategy(TorchConfig(), context), Vision(folder)
    rows = make_rows(vision)
    before = strategy.logprobs(rows)
    ids = rows.input_ids.copy()
    at = np.flatnonzero(rows.response_mask)[1]
    ids[at] = IMAGE
    after = strategy.logprobs(evolve(rows, input_ids=ids))
    assert np.isfinite(after).all()
    assert after[0] == before[0]
    assert not np.allclose(after[1:4], before[1:4])
    strategy.close()


def test_images_that_are_not_in_the_ids_are_reported(context: TrainContext, folder: Path) -> None:
    strategy = TorchStrategy(TorchConfig(), context)
    rows = make_rows(Vision(folder))
    wrong = evolve(rows, images=((picture(0, 56, 56),), *rows.images[1:]))
    with pytest.raises(ConfigError, match="image 1 of a sample is 4 tokens, its ids hold another number"):
        strategy.logprobs(wrong)
    strategy.close()


def test_packing_and_text_models_refuse_images(context: TrainContext, tmp_path: Path, folder: Path) -> None:
    budgets = {"max_tokens_per_microbatch_in_train": 64, "max_tokens_per_microbatch_in_infer": 64}
    with pytest.raises(ConfigError, match="a vision-language model is not packed"):
        TorchStrategy(TorchConfig(), evolve(context, use_sequence_packing=True, **budgets))
    strategy = TorchStrategy(TorchConfig(), evolve(context, model=tiny_model(tmp_path / "text", vocab_size=60)))
    with pytest.raises(TrainerError, match="takes text alone"):
        strategy.logprobs(make_rows(Vision(folder)))
    strategy.close()
