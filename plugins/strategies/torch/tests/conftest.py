"""Tiny models and random rows for the tests of turnwise-torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.rows import Rows, Update
from turnwise_torch.config import TorchConfig
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.strategy import TorchStrategy


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 in fp32: 2 layers, hidden 32, 50 tokens."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(folder: Path) -> Callable[..., TorchStrategy]:
    """Build the strategy on the tiny model in fp32; keywords go to the context, `config` is the strategy's."""

    def make(config: TorchConfig | None = None, **changes: Any) -> TorchStrategy:
        options: dict[str, Any] = {
            "model": folder,
            "role": "actor_train",
            "dtype": "fp32",
            "gradient_checkpointing": False,
            "objective": Objective(LossChoice("ppo")),
            "per_device_train_batch_size": 4,
            "infer_batch_size": 4,
        }
        return TorchStrategy(config, TrainContext(**{**options, **changes}))

    return make


def make_rows(seed: int = 0, samples: int = 9) -> Rows:
    """Samples of 5 to 20 tokens, two or three turns each; one without a response, one with tokens after its last
    response."""
    rng = np.random.default_rng(seed)
    ids, masks, turns, trajectories = [], [], [], []
    for s in range(samples):
        mask = np.zeros(int(rng.integers(5, 21)), bool)
        turn = np.full(len(mask), -1)
        at = 1
        for k in range(int(rng.integers(2, 4))):
            at += int(rng.integers(1, 3))
            end = min(at + int(rng.integers(1, 4)), len(mask))
            mask[at:end], turn[at:end] = True, 3 * s + k
            at = end
        if s == 1:
            mask[:] = False
        ids.append(rng.integers(0, 50, len(mask)).astype(np.int32))
        masks.append(mask)
        turns.append(turn[mask])
        trajectories.append(np.full(int(mask.sum()), s // 2))
    mask = np.concatenate(masks)
    n = int(mask.sum())
    weight = np.repeat(rng.choice([0.5, 1.0], samples), [m.sum() for m in masks])
    coef = weight * (rng.random(n) > 0.2) / n
    return Rows(
        input_ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum([len(i) for i in ids])]).astype(np.int64),
        response_mask=mask,
        columns={
            "coef": coef,
            "weight": weight,
            "advantages": rng.normal(size=n),
            "old_log_probs": (-np.log(50) + 0.3 * rng.normal(size=n)).astype(np.float32),
            "ref_log_probs": (-np.log(50) + 0.3 * rng.normal(size=n)).astype(np.float32),
            "infer_log_probs": np.full(n, np.nan, np.float32),
            "sample": np.repeat(np.arange(samples), [m.sum() for m in masks]),
            "turn": np.concatenate(turns),
            "trajectory": np.concatenate(trajectories),
            "versions": np.zeros(n, np.int32),
        },
    )


@pytest.fixture
def rows() -> Rows:
    """Nine random samples with every column of an update."""
    return make_rows()


@pytest.fixture
def update(rows: Rows) -> Update:
    """An update over the nine samples with an entropy bonus and a KL term."""
    return Update(rows=rows, lr=1e-3, entropy_coef=0.01, kl_coef=0.1)
