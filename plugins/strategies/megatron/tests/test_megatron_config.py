"""The options of Megatron: how devices divide, bytes by hand, and what is checked without the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.errors import CheckpointError
from turnwise.testing.compare import says
from turnwise_megatron import train_strategies
from turnwise_megatron.architecture import read_architecture
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.strategy import MegatronStrategy


def config(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> MegatronConfig:
    return MegatronConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        **more,
    )


@pytest.mark.parametrize(
    ("sizes", "world", "data"), [((1, 1, 1), 4, 4), ((2, 1, 1), 16, 8), ((2, 2, 2), 16, 2), ((2, 2, 1, 4), 16, 4)]
)
def test_the_data_parallel_size_is_what_model_parallelism_leaves(sizes: tuple[int, ...], world: int, data: int) -> None:
    assert config(*sizes).data_parallel_size(world) == data


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((4, 1, 1), "6 devices are not divisible by tensor"),
        ((1, 1, 1, 4), "6 devices of a pipeline stage are not divisible by expert_model"),
    ],
)
def test_devices_that_cannot_be_divided_are_an_error(sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(*sizes).data_parallel_size(6)


def test_bytes_by_hand() -> None:
    facts = {"parameters": 1600, "dtype": "bf16", "world": 16, "activations": 64, "activations_kept": 640}
    one = config(tp=2, sequence_parallel=True, recompute_granularity="full").memory(facts)
    assert one == {"weights": 800 * 2, "gradients": 800 * 4, "optimizer": 800 * 12 // 8, "activations": 32}
    whole = config(tp=2, use_distributed_optimizer=False, recompute_granularity="full").memory(facts)
    assert whole == {"weights": 1600, "gradients": 3200, "optimizer": 9600, "activations": 64}
    assert config(cp=2).memory(facts)["activations"] == 320  # nothing is recomputed
    assert config(cp=2).memory(facts)["optimizer"] == 1600 * 12 // 16  # sharded over data and context parallel ranks
    frozen = config(tp=2, recompute_granularity="full").memory({**facts, "trainable": False})
    assert (frozen["gradients"], frozen["optimizer"]) == (0, 0)


def test_the_names_of_the_field_answer() -> None:
    (record,) = train_strategies()
    assert record.requires == ("megatron",)
    assert record.aliases == ("megatron_train", "megatron_infer")


def test_what_needs_no_engine_is_checked_without_it() -> None:
    context = TrainContext(
        model=Path("m"), role="actor_train", objective=Objective(LossChoice("vanilla")), devices=tuple(range(4))
    )
    assert MegatronStrategy.check(config(tp=2, pp=2), context) == []
    (line,) = map(str, MegatronStrategy.check(config(tp=3), context))
    assert line.startswith("$.actor_train.device_mapping: 4 devices are not divisible by tensor_model_parallel_size 3")
    problems = MegatronStrategy.check(config(engine_args={"lr": 1, "moe_grouped_gemm": True}), context)
    decided, unsupported = (problem.text for problem in problems)
    says(decided, "decided by training_args", "Fix: remove it")
    says(unsupported, "does not support it", "Fix: remove it")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"betas": [0.9]}, "betas must be two"), ({"eps": 0.0}, "eps"), ({"logits_chunk": -1}, "logits_chunk")],
)
def test_the_options_of_adamw_are_checked(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MegatronConfig(**wrong)


def test_a_models_own_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked says yes."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "own_code", "auto_map": {"AutoConfig": "own_code.Own"}}', encoding="utf-8"
    )
    (tmp_path / "own_code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: ...\n", encoding="utf-8"
    )
    monkeypatch.setattr("builtins.input", lambda _: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(CheckpointError, match=r"no architecture that transformers has\. Fix: another pretrain"):
        read_architecture(tmp_path)
    assert not (tmp_path / "ran").exists()
