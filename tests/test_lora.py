"""Adapters from the command line: the reference is the actor with its adapters off, no third model is loaded, and the export is the merged model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="LoRA needs peft: pip install 'turnwise-torch[lora]'")

LORA = ("actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_target=all-linear", "kl_loss_coef=0.1", "max_steps=2", "eval_steps=0")


def test_a_run_with_adapters_and_a_kl_loss_builds_one_strategy(make_lake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = importlib.import_module("turnwise_torch.strategy").TorchStrategy
    built: list[str] = []
    original = strategy.__init__

    def watched(self: Any, config: Any, context: Any) -> None:
        built.append(context.role)
        original(self, config, context)

    monkeypatch.setattr(strategy, "__init__", watched)
    run = make_lake()
    run.train(*LORA)
    assert built == ["actor_train"]
    lines = [json.loads(line) for line in next(Path(run.folder).rglob("metrics.jsonl")).read_text().splitlines()]
    assert lines[0]["policy/kl"] == pytest.approx(0, abs=1e-4)  # the adapters begin with adding nothing
    assert lines[1]["policy/kl"] > lines[0]["policy/kl"]
    model = next(Path(run.folder).rglob("checkpoint-000002/model"))
    assert (model / "model.safetensors").is_file()
    assert (model / "adapter" / "adapter_model.safetensors").is_file()


def test_a_reference_with_settings_of_its_own_is_loaded(make_lake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = importlib.import_module("turnwise_torch.strategy").TorchStrategy
    built: list[str] = []
    original = strategy.__init__
    monkeypatch.setattr(strategy, "__init__", lambda self, config, context: (built.append(context.role), original(self, config, context))[1])
    make_lake().train(*LORA, "reference={model_args: {dtype: fp32, attn_implementation: eager}}")
    assert sorted(built) == ["actor_train", "reference"]
