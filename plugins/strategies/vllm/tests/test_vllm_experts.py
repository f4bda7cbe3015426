"""Experts that come one by one, as the trainers send them, reach the tensors that vLLM fuses them to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_cases import CLOSE, FAR, IN_PROCESS

from turnwise.contracts.chat import ModelSourceContext
from turnwise.errors import EngineError

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600), *IN_PROCESS]
TEXTS = ("The goal is 2 down 1 right. Holes: Left Down.", "Which way?", "Left", "Down", "Right", "Up")


@pytest.fixture(scope="module")
def experts(make_lab: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of a tiny Qwen3-MoE that was read from its folder."""
    from turnwise_hf.source import HfModelSource

    place: Path = tmp_path_factory.mktemp("experts")
    source = HfModelSource(
        None, ModelSourceContext(cache=place, texts=lambda: [{"role": "user", "content": text} for text in TEXTS])
    )
    recipe = {
        "architecture": "qwen3_moe",
        "hidden_size": 64,
        "num_heads": 2,
        "initializer_range": 0.15,
        "max_position_embeddings": 512,
    }
    folder = source.prepare({"recipe": recipe})
    lab = make_lab({"load_format": "auto"}, model=folder, chat=source.chat(folder))
    yield lab
    lab.close()


def off(lab: Any, model: Any) -> float:
    """The largest difference of a log-prob from the model's, over answers at two temperatures."""
    requests = [lab.request(seed, tokens=12, prompt=seed, temperature=t) for seed, t in enumerate((0.7, 1.0))]
    return max(lab.off(model, request, answer) for request, answer in zip(requests, lab.ask(*requests), strict=True))


def test_log_probs_are_the_models_before_and_after_experts_come_one_by_one(experts: Any) -> None:
    from turnwise_torch.experts import to_checkpoint
    from turnwise_torch.models import load_causal_lm

    base, model = load_causal_lm(experts.context.model, "fp32", "eager"), experts.model(3)
    assert off(experts, base) < CLOSE
    assert off(experts, model) > FAR
    named = dict(to_checkpoint(model, model.state_dict().items()))
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in named
    assert experts.runner.run(experts.send(named.items())) == experts.version
    assert off(experts, model) < CLOSE
    lacking = [(name, tensor) for name, tensor in named.items() if "1.mlp.experts.2.up_proj" not in name]
    with pytest.raises(
        EngineError,
        match=(
            r"the weight update lacks 1 tensors of the model, such as"
            r" 'model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight'"
        ),
    ):
        experts.runner.run(experts.send(lacking))
    model = experts.model(4)
    experts.runner.run(experts.send(to_checkpoint(model, model.state_dict().items())))
    assert off(experts, model) < CLOSE
