"""Tiny models, plain torch to compare with, and the strategy in this process for the tests of turnwise-deepspeed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_cases import context, run_updates

from turnwise_deepspeed.config import DeepspeedConfig
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import weights_of


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random Qwen2 models in fp32 with tied and untied embeddings: 2 layers, hidden 32, 50 tokens."""
    return {name: tiny_model(tmp_path_factory.mktemp(name), tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="session")
def folder(folders: dict[str, Path]) -> Path:
    """The tied one."""
    return folders["tied"]


@pytest.fixture(scope="session")
def plain(folders: dict[str, Path]) -> Callable[..., tuple[list[Any], dict[str, torch.Tensor]]]:
    """The reports and the weights of the five updates under the strategy `torch` in one process, computed once per set
    of options."""
    known: dict[str, Any] = {}

    def compute(model: str = "tied", **changes: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
        key = repr((model, sorted(changes.items())))
        if key not in known:
            strategy = TorchStrategy(None, context(folders[model], **changes))
            known[key] = (run_updates(strategy), weights_of(strategy))
        return known[key]

    return compute


@pytest.fixture
def build(folder: Path) -> Iterator[Callable[..., Any]]:
    """Build the strategy in this process and close it after the test; keywords go to the context."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')")
    from turnwise_deepspeed.strategy import DeepspeedStrategy

    gc.freeze()  # DeepSpeed collects garbage whenever an engine starts
    built: list[Any] = []

    def make(config: DeepspeedConfig, **changes: Any) -> Any:
        options = {"model": folder, **changes}
        built.append(DeepspeedStrategy(config, context(options.pop("model"), **options)))
        return built[-1]

    yield make
    for strategy in built:
        strategy.close()
