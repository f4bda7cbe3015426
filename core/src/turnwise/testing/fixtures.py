"""What the conformance kit needs to build the fakes."""

from __future__ import annotations

import functools
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import LossChoice, Objective, Offer, TrainContext
from turnwise.data.trajectory import float32
from turnwise.testing.fake_model import VOCABULARY, FakeChat, initial_weights, log_softmax, save_model


def _reference_logprobs(ids: np.ndarray, temperature: float, seed: int = 0) -> np.ndarray:
    weights = initial_weights(seed=seed)
    return float32([log_softmax(weights[a] / temperature)[b] for a, b in pairwise(ids)])


def backend() -> dict[str, Any]:
    """For FakeBackend."""
    return {
        "context": InferenceContext(None, FakeChat()),
        "reference_logprobs": _reference_logprobs,
        "offer": lambda version: Offer("fake", version, {"weights": initial_weights()}),
        "other_logprobs": functools.partial(_reference_logprobs, seed=1),
        "other_offer": lambda version: Offer("fake", version, {"weights": initial_weights(seed=1)}),
    }


def strategy() -> dict[str, Any]:
    """For FakeStrategy."""
    model = Path(tempfile.mkdtemp(prefix="turnwise-fake-"))
    save_model(model, initial_weights())
    return {
        "context": TrainContext(model, "actor_train", objective=Objective(LossChoice("fake_loss"))),
        "reference_logprobs": _reference_logprobs,
        "vocab_size": VOCABULARY,
        "lr": 0.1,
    }


def source() -> dict[str, Any]:
    """For FakeModelSource."""
    return {"pretrain": {"letters": "abcd"}, "texts": ["abc", "b"]}
