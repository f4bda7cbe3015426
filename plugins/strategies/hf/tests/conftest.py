"""Tiny model folders, made once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.chat import ModelSourceContext
from turnwise_hf import backend as backend_module
from turnwise_hf.source import HfModelSource

# hf_cases: the suite runs in importlib mode, where folders of tests are on no path.
sys.path.insert(0, str(Path(__file__).parent))

TEXTS = (
    "The goal is 2 down 1 right. Holes: Left Down.",
    "Which way?",
    "Left",
    "Down",
    "Right",
    "Up",
    "You walk on a frozen lake.",
)
SHOWN = [{"role": "user", "content": text} for text in TEXTS]
SMALL = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 256}
"""A spread initialisation: log-probs of different tokens, positions and temperatures are far apart."""


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make(**recipe)`: the folder of a small recipe."""
    cache = tmp_path_factory.mktemp("models")

    def build(**recipe: Any) -> Path:
        return HfModelSource(None, ModelSourceContext(cache=cache, seed=5, texts=lambda: SHOWN)).prepare(
            {"recipe": {**SMALL, **recipe}}
        )

    return build


@pytest.fixture(scope="session")
def folder(make: Callable[..., Path]) -> Path:
    """The small Qwen2 with a word tokenizer."""
    return make()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of the rows of every batch that is sampled from now on."""
    seen: list[list[int]] = []
    original = backend_module.sample_batch

    def watched(rows: Any, *rest: Any) -> Any:
        seen.append([row.seed for row in rows])
        return original(rows, *rest)

    monkeypatch.setattr(backend_module, "sample_batch", watched)
    return seen
