"""Random rows and updates, forms of ZeRO, and groups of ranks for the tests of turnwise-deepspeed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.ports import free_port
from turnwise.testing.ranks import run_ranks
from turnwise_deepspeed.config import DeepspeedConfig

WORKER = Path(__file__).with_name("deepspeed_worker.py")
COUNTS, SIZES = (9, 5, 1, 12, 4), (4, 2, 4, 8, 1)
"""Samples of five updates and rows of their micro-batches; with two ranks one of them has no sample in the third."""
PARTITIONED = {"stage3_param_persistence_threshold": 0}


def zero(stage: int, *offloaded: str) -> DeepspeedConfig:
    """A stage, with `optimizer` and `param` in main memory; at stage 3 every parameter is sharded, however small."""
    block: dict[str, Any] = dict(PARTITIONED) if stage == 3 else {}
    block |= {f"offload_{what}": {"device": "cpu", "pin_memory": True} for what in offloaded}
    return DeepspeedConfig(stage=stage, zero_optimization=block)


FORMS = {
    "0": zero(0),
    "1": zero(1),
    "2": zero(2),
    "3": zero(3),
    "2 optimizer": zero(2, "optimizer"),
    "3 optimizer param": zero(3, "optimizer", "param"),
}


def context(folder: Path, **changes: Any) -> TrainContext:
    """fp32, decay, clipping that acts, the loss `ppo` with an entropy and a KL term."""
    options: dict[str, Any] = {
        "model": folder,
        "role": "actor_train",
        "dtype": "fp32",
        "gradient_checkpointing": False,
        "objective": Objective(LossChoice("ppo")),
        "per_device_train_batch_size": 4,
        "infer_batch_size": 4,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "runtime_timeout": 200.0,
    }
    return TrainContext(**{**options, **changes})


def make_rows(seed: int, samples: int) -> Rows:
    """Samples of 6 to 20 tokens, of which those from a third to three quarters in are sampled, in two turns; every
    column of an update."""
    rng = np.random.default_rng(seed)
    masks = [np.zeros(int(n), bool) for n in rng.integers(6, 21, samples)]
    for mask in masks:
        mask[len(mask) // 3 : 3 * len(mask) // 4] = True
    counts = np.array([int(mask.sum()) for mask in masks])
    n = int(counts.sum())
    weight = np.repeat(rng.choice([0.5, 1.0], samples), counts)
    return Rows(
        input_ids=np.concatenate([rng.integers(0, 50, len(mask)) for mask in masks]).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(mask) for mask in masks])]).astype(np.int64),
        response_mask=np.concatenate(masks),
        columns={
            "coef": weight * (rng.random(n) > 0.2) / n,
            "weight": weight,
            "advantages": rng.normal(size=n),
            "trajectory_advantages": np.repeat(rng.normal(size=samples), counts),
            "scores": np.repeat(rng.normal(size=samples), counts),
            "old_log_probs": (-np.log(50) + 0.3 * rng.normal(size=n)).astype(np.float32),
            "ref_log_probs": (-np.log(50) + 0.3 * rng.normal(size=n)).astype(np.float32),
            "infer_log_probs": (-np.log(50) + 0.3 * rng.normal(size=n)).astype(np.float32),
            "returns": rng.normal(size=n),
            "values": rng.normal(size=n).astype(np.float32),
            "sample": np.repeat(np.arange(samples), counts),
            "turn": np.concatenate([2 * s + (np.arange(c) >= c // 2) for s, c in enumerate(counts)]),
            "trajectory": np.repeat(np.arange(samples) // 2, counts),
        },
    )


def five_updates() -> list[Update]:
    """Five updates of different sizes and rates."""
    return [
        Update(make_rows(i, n), lr=1e-3 * (i + 1) / 5, entropy_coef=0.01, kl_coef=0.1) for i, n in enumerate(COUNTS)
    ]


def run_updates(strategy: Any, updates: Sequence[Update] = ()) -> list[Any]:
    """What the five updates report."""
    return [strategy.update(update) for update in updates or five_updates()]


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two models."""
    assert set(one) == set(other)
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def run_cases(cases: dict[str, Any], folder: Path, size: int = 2) -> list[Any]:
    """What each of `size` processes of deepspeed_worker.py found in the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job").write_bytes(pickle.dumps(cases))
    address = f"127.0.0.1:{free_port()}"
    compiled = {"TORCH_EXTENSIONS_DIR": str(folder / "compiled")}
    codes, said = run_ranks(
        lambda rank: [sys.executable, str(WORKER), str(folder), str(rank), str(size), address],
        size,
        folder,
        environment=compiled,
    )
    assert codes == [0] * size, said
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(size)]


def make_picture_rows(folder: Path, pictures: Sequence[bool], seed: int = 0) -> Rows:
    """A sample of seven sampled tokens for each of `pictures`, after a picture where it is true; longer ones come first
    in an update."""
    from turnwise_torch.vision import Vision

    rng, vision = np.random.default_rng(seed), Vision(folder)
    ids: list[list[int]] = []
    images: list[tuple[np.ndarray, ...]] = []
    for shown in pictures:
        images.append((rng.integers(0, 256, (56, 84, 3), dtype=np.uint8),) if shown else ())
        run = [52, *[50] * vision.tokens(images[-1][0]), 53] if shown else rng.integers(0, 40, 40).tolist()
        ids.append([1, *run, *rng.integers(0, 40, 7).tolist()])
    n, owner = 7 * len(ids), np.repeat(np.arange(len(ids)), 7)
    columns = dict.fromkeys(("sample", "turn", "trajectory"), owner)
    columns |= {
        "coef": np.full(n, 1 / n),
        "weight": np.ones(n),
        "advantages": rng.normal(size=n),
        "old_log_probs": np.full(n, np.nan),
    }
    mask = np.concatenate([[False] * (len(sample) - 7) + [True] * 7 for sample in ids])
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in ids])]).astype(np.int64)
    return Rows(np.concatenate(ids).astype(np.int32), offsets, mask, columns, tuple(images))
