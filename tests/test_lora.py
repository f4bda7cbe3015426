"""Adapters from the command line: the reference is the actor with its adapters off, no third model is loaded, and the
export is the merged model."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.inference import BackendCapabilities

pytest.importorskip("peft", reason="LoRA needs peft: pip install 'turnwise-torch[lora]'")

ALONE = ("shared_memory", "process_group", "safetensors")
LORA = (
    "actor_train.model_args.lora_rank=4",
    "actor_train.model_args.lora_target=all-linear",
    "kl_loss_coef=0.1",
    "max_steps=2",
    "eval_steps=0",
)
SYNC = (*LORA, "actor_train.model_args.lora_sync=adapter", "recompute_old_logprobs=true")


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
    monkeypatch.setattr(
        strategy,
        "__init__",
        lambda self, config, context: (built.append(context.role), original(self, config, context))[1],
    )
    make_lake().train(*LORA, "reference={model_args: {dtype: fp32, attn_implementation: eager}}")
    assert sorted(built) == ["actor_train", "reference"]


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the sampler receives from now on."""
    backend = importlib.import_module("turnwise_hf.backend").HfBackend
    original, seen = backend.receive, []

    async def watched(self: Any, offer: Any) -> int:
        seen.append(offer)
        return await original(self, offer)

    monkeypatch.setattr(backend, "receive", watched)
    return seen


@pytest.mark.parametrize("transport", ALONE)
def test_adapters_alone_make_the_sampler_what_the_trainer_is(
    make_lake: Any, offers: list[Any], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr("turnwise_hf.backend.HfBackend.transports", staticmethod(lambda config, context: (transport,)))
    run = make_lake()
    run.train(*SYNC, "max_steps=3", "actor_train.training_args.learning_rate=0.05")
    assert {offer.transport for offer in offers} == {transport}
    assert [offer.version for offer in offers] == [0, 1, 2, 3]
    assert {(offer.adapter["r"], offer.adapter["peft_type"]) for offer in offers} == {(4, "LORA")}
    steps = run.metrics()[:3]
    assert max(step["correction/log_prob_diff/max"] for step in steps) < 1e-5
    assert steps[2]["policy/kl"] > 1e-3  # far from the base, with which a sampler without updates would have played


def test_a_run_with_adapters_alone_resumes_and_its_checkpoints_play(make_lake: Any, offers: list[Any]) -> None:
    lake = make_lake()
    alone = (
        *SYNC,
        "max_steps=4",
        "eval_steps=4",
        "actor_infer.model_args.dtype=bf16",
    )  # of another dtype, it cannot share the trainer's module
    lake.train(*alone, "output_dir=whole")
    assert {offer.transport for offer in offers} == {"shared_memory"}
    killed = lake.process("train", "run.yaml", *alone, at=("turnwise_torch.strategy:TorchStrategy.update", 6, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lake.train(*alone, "resume_from_checkpoint=true")
    lake.same(lake, "out", "whole")
    assert max(step["correction/log_prob_diff/max"] for step in lake.metrics()[:4]) < 0.1
    offers.clear()
    for command, which in (("eval", "latest"), ("eval", "out/checkpoints/checkpoint-000002"), ("rollout", "latest")):
        result = lake.command(command, "run.yaml", "--model", which, *SYNC)
        assert result.exit_code == 0, result.output
    assert offers == []  # the export is the merged model


def test_adapters_alone_for_a_backend_that_takes_whole_weights_are_refused(
    make_lake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise_hf.config.HfConfig.capabilities", BackendCapabilities())
    result = make_lake().command("train", "run.yaml", *SYNC)
    assert result.exit_code == 2
    assert (
        "$.actor_train.model_args.lora_sync: the strategy of actor_infer takes whole weights only. Fix: lora_sync:"
        " merged" in result.output
    )
