"""Estimates by hand: tokens, memory of roles without a strategy's own count, disk, time from an earlier run, and facts
that are not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from turnwise.config.schema import Choice, CustomEnv, EnvManagerConfig, ModelArgs, Role, RunConfig, TrainingArgs
from turnwise.contracts.inference import GeneratingArgs
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.contracts.train import StrategyCapabilities
from turnwise.errors import ConfigError
from turnwise.planning import cpu, estimates
from turnwise.planning.facts import find_config, read_facts

CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8  # q, k and v, o, the three of the MLP, two norms
COUNT = 2 * 10 * 8 + 2 * LAYER + 8


@frozen
class Sharded:
    @property
    def capabilities(self) -> StrategyCapabilities:
        return StrategyCapabilities(data_parallel_size=self.data_parallel_size, memory=self.memory)

    def data_parallel_size(self, world: int) -> int:
        return world

    def memory(self, facts: dict[str, Any]) -> dict[str, int]:
        return {"weights": facts["parameters"] // facts["world"], "activations": facts["activations"] // 2, "cpu": 7}


def run_of(**changes: Any) -> RunConfig:
    role = Role(
        model_args=ModelArgs(dtype="fp32"),
        training_args=TrainingArgs(per_device_train_batch_size=2),
        strategy_args=Choice("x"),
        generating_args=GeneratingArgs(max_new_tokens=6),
    )
    base = RunConfig(
        max_steps=10,
        rollout_batch_size=8,
        pretrain="model",
        sequence_length=100,
        train_env_manager=EnvManagerConfig(4, 2, ("T", "S"), (1, 3)),
        custom_envs={
            "T": CustomEnv("e", max_steps=5, max_tokens_per_step=4, env_manager=Choice("trajectory")),
            "S": CustomEnv("e", max_steps=3, env_manager=Choice("trajectory")),
        },
        actor_train=role,
        actor_infer=role,
    )
    return evolve(base, **changes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def test_tokens_of_a_step_by_the_limits() -> None:
    assert estimates.tokens_per_step(run_of()) == {"sampled": 2 * 5 * 4 + 6 * 3 * 6, "trained": 8 * 100}
    assert estimates.tokens_per_step(run_of(sequence_length=10)) == {
        "sampled": 80,
        "trained": 80,
    }  # no more fits the rows


def test_memory_where_the_strategy_does_not_count(model: Path) -> None:
    values = estimates.estimates(run_of(), model)
    assert values["model"]["parameters"] == COUNT
    infer, train = values["memory"]
    assert (infer["role"], infer["phase"]) == ("actor_infer", "sampling")
    assert infer["weights"] == 4 * COUNT
    assert infer["kv_cache"] == 8 * 100 * 2 * 2 * 4 * 4  # episodes × tokens × keys and values × layers × width × bytes
    a_layer = 6 * 8 + 3 * 8 + 2 * 4 + 4 * 16
    assert train["activations"] == 200 * (2 * 8 + a_layer) * 4 + 6 * 4 * 200 * 10
    kept = evolve(run_of().actor_train, model_args=ModelArgs(dtype="fp32", disable_gradient_checkpointing=True))
    assert (
        estimates.estimates(run_of(actor_train=kept), model)["memory"][1]["activations"]
        == 200 * 2 * a_layer * 4 + 6 * 4 * 200 * 10
    )
    assert train["total"] == train["weights"] + train["activations"]


def test_attention_that_is_written_out_grows_with_the_square_of_the_length(model: Path) -> None:
    def activations(**model_args: Any) -> int:
        role = evolve(run_of().actor_train, model_args=ModelArgs(dtype="fp32", **model_args))
        values = estimates.estimates(run_of(actor_train=role), model)
        return int(values["memory"][1]["activations"])

    one = 4 * 4 * 2 * 100**2  # bytes × heads × rows × pairs of positions
    eager = {"attn_implementation": "eager"}
    assert activations(**eager) - activations() == (2 + 3) * one
    kept = {"disable_gradient_checkpointing": True}
    assert activations(**kept, **eager) - activations(**kept) == (2 * 2 + 3) * one


def on_cpu(monkeypatch: pytest.MonkeyPatch, free: int, gpus: int = 0) -> None:
    monkeypatch.setattr(cpu, "available", lambda: free)
    monkeypatch.setattr(cpu, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(cpu, "runtime_capabilities", lambda config: RuntimeCapabilities(one_process=True))
    monkeypatch.setattr(cpu, "_shares", lambda config: False)


def test_a_run_without_gpu_is_compared_with_this_machines_main_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, 10**9)
    values = estimates.estimates(run_of(), model)
    infer, train = values["memory"]
    held = cpu.LIBRARIES + sum(values["cpu"].values()) + infer["weights"] + train["weights"]
    passing = {"training": train["activations"], "sampling": infer["kv_cache"]}
    assert values["one_process"]["total"] == held + max(passing.values())
    assert values["one_process"]["phase"] == max(passing, key=lambda phase: passing[phase])
    assert estimates.warnings(values, run_of()) == estimates.cpu_warnings(run_of(), model) == []
    assert "of the whole run about" in estimates.render(values)


def test_playing_ahead_takes_a_copy_of_the_weights_and_room_for_what_waits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = cpu._shares
    on_cpu(monkeypatch, 10**9)
    monkeypatch.setattr(cpu, "_shares", shares)
    # `estimates` and `cpu` ask the one module.
    monkeypatch.setattr(
        estimates.transport, "choose", lambda config: "shared_memory" if config.async_generation_ratio else "shared"
    )
    behind, ahead = (estimates.estimates(run_of(async_generation_ratio=ratio), model) for ratio in (0, 2))
    assert (behind["copied"], ahead["copied"]) == (None, 4 * COUNT)
    assert ahead["cpu"]["rollout"] == 3 * behind["cpu"]["rollout"]
    more = ahead["one_process"]["total"] - behind["one_process"]["total"]
    assert more == 4 * COUNT + 2 * behind["cpu"]["rollout"]
    assert "are a copy of the weights, which playing ahead needs" in estimates.render(ahead)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, ["actor_train.training_args.per_device_train_batch_size (500"]),
        (
            {"model_args": ModelArgs(dtype="fp32", disable_gradient_checkpointing=True)},
            ["actor_train.model_args.disable_gradient_checkpointing: false", "per_device_train_batch_size (500"],
        ),
        (
            {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 50_000},
            ["lower the token budget of actor_train (50000)"],
        ),
    ],
)
def test_what_main_memory_does_not_hold_is_a_warning_with_the_keys(
    model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keys: list[str]
) -> None:
    on_cpu(monkeypatch, 6 * 10**8)
    role = evolve(run_of().actor_train, training_args=TrainingArgs(per_device_train_batch_size=500), **changes)
    config = run_of(actor_train=role)
    (line,) = estimates.warnings(estimates.estimates(config, model), config)
    assert [line] == estimates.cpu_warnings(config, model)
    assert all(key in line for key in [*keys, "this machine has no GPU and 0.6 GB to give", "Fix: ", "(100)"]), line
    on_cpu(monkeypatch, 6 * 10**8, gpus=1)
    assert estimates.cpu_warnings(config, model) == []


def test_memory_as_the_strategy_counts_it(model: Path) -> None:
    plain = run_of().actor_train
    role = evolve(plain, strategy_args=Choice("x", {}, Sharded()), device_mapping=(0, 1))
    budget = evolve(role, use_dynamic_batching_in_train=True, max_tokens_per_microbatch_in_train=150)
    train = estimates.estimates(run_of(actor_train=role), model)["memory"][1]
    assert (train["weights"], train["cpu"]) == (COUNT // 2, 7)
    fewer = estimates.estimates(run_of(actor_train=budget), model)["memory"][1]
    assert fewer["activations"] == train["activations"] * 150 // 200
    packed = evolve(role, use_sequence_packing=True)
    assert (
        estimates.estimates(run_of(actor_train=packed), model)["memory"][1]["activations"]
        == train["activations"] * 100 // 200
    )


def test_the_reference_and_the_critic_count_where_they_are_loaded(model: Path) -> None:
    role = run_of().actor_train
    values = estimates.estimates(run_of(critic=role, kl_loss_coef=0.1), model)
    assert [(line["role"], line["phase"]) for line in values["memory"]] == [
        ("actor_infer", "sampling"), ("reference", "log-probs"), ("actor_train", "training"), ("critic", "training"),
    ]  # fmt: skip
    assert values["disk"]["checkpoint"] == 2 * 12 * COUNT + 4 * COUNT
    assert estimates.estimates(run_of(), model)["disk"]["checkpoint"] == 12 * COUNT + 4 * COUNT


VISION = {
    **CONFIG, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 6, "intermediate_size": 10, "depth": 3, "out_hidden_size": 8,
    "patch_size": 5, "temporal_patch_size": 2, "spatial_merge_size": 2},
}  # fmt: skip


def test_images_are_counted_at_most_where_the_model_reads_them(model: Path) -> None:
    assert "images" not in estimates.estimates(run_of(), model)["cpu"]
    (model / "model" / "config.json").write_text(json.dumps(VISION), encoding="utf-8")
    role = run_of().actor_train
    kept = evolve(role, model_args=ModelArgs(dtype="bf16", disable_gradient_checkpointing=True))
    values = estimates.estimates(run_of(kl_loss_coef=0.1, reference=role, critic=kept), model)
    assert values["cpu"]["images"] == 800 * 4 * 5 * 5 * 3  # tokens × patches × pixels × colours
    _, reference, actor, critic = values["memory"]
    patches, a_layer = 200 * 4, 8 * 6 + 3 * 10
    inputs = 4 * 3 * 2 * 5 * 5  # fp32, channels, frames, pixels
    assert reference["images"] == patches * (inputs + a_layer * 4)
    assert actor["images"] == patches * (inputs + (3 * 6 + a_layer) * 4)
    assert critic["images"] == patches * (inputs + 3 * a_layer * 2)
    assert actor["total"] == actor["weights"] + actor["activations"]  # an upper bound is no reason to warn
    text = estimates.render(values)
    assert text.count(" more") == 3
    assert "images 240 kB, at most" in text


def test_main_memory_holds_a_column_of_each_model(model: Path) -> None:
    role = run_of().actor_train
    assert estimates.estimates(run_of(), model)["cpu"] == {
        "rollout": 17 * 800,
        "log_probs": 4 * 800,
        "advantages": 8 * 800,
    }
    assert estimates.estimates(run_of(init_kl_coef=0.1), model)["cpu"]["log_probs"] == 8 * 800
    assert estimates.estimates(run_of(init_kl_coef=0.1, critic=role), model)["cpu"]["log_probs"] == 12 * 800


def test_what_does_not_fit_is_reported_of_devices_alone(model: Path) -> None:
    on_cpu = run_of()
    assert estimates.warnings(estimates.estimates(on_cpu, model, device_gb=1e-6), on_cpu) == []
    on_gpu = run_of(actor_train=evolve(on_cpu.actor_train, device_mapping=(0,)))
    (line,) = estimates.warnings(estimates.estimates(on_gpu, model, device_gb=1e-6), on_gpu)
    assert line.startswith(
        "actor_train: about 0 GB in training is too much for a device of 1e-06 GB. Fix: lower"
        " per_device_train_batch_size (2;"
    )
    assert estimates.warnings(estimates.estimates(on_gpu, model), on_gpu) == []


def test_an_unknown_model_is_said_to_be_unknown(tmp_path: Path) -> None:
    for pretrain in ("nowhere", {"recipe": {}}):
        values = estimates.estimates(run_of(pretrain=pretrain), tmp_path)
        assert (values["model"], values["memory"], values["disk"]["checkpoint"]) == (None, None, None)
        text = estimates.render(values)
        assert "memory         unknown" in text
        assert "checkpoint unknown" in text


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", '{"model_type": "mamba"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_config_that_cannot_be_counted_is_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert read_facts(tmp_path / "config.json") is None


def test_where_the_config_of_a_model_is_looked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert find_config(str(model / "model"), Path("elsewhere")) == model / "model" / "config.json"
    assert find_config("model", model) is not None
    assert find_config("maker/model", model) is None
    (model / "models").mkdir()
    (model / "model").rename(model / "models" / "model")
    assert find_config("maker/model", model) == model / "models" / "model" / "config.json"
    (model / "examples").mkdir()
    (model / "models").rename(model / "examples" / "models")
    assert find_config("maker/model", Path("elsewhere")) == Path("examples/models/model/config.json")


def test_time_from_an_earlier_run_by_hand(tmp_path: Path) -> None:
    lines: list[dict[str, float]] = [
        {"step": 0, "time/rollout": 2.0, "time/actor_train": 4.0, "time/eval": 10.0, "time/step": 16.0},
        {"step": 1, "time/rollout": 4.0, "time/actor_train": 2.0, "time/step": 6.0, "time/save": 3.0},
        {"step": 2, "time/eval": 20.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = run_of(eval_steps=4, val_env_manager=EnvManagerConfig(1, 1, ("T",), (1,)), save_steps=5)
    values = estimates.times(config, tmp_path)
    assert values["phases"] == {"actor_train": 3.0, "rollout": 3.0}
    assert (values["step"], values["evaluation"], values["save"]) == (6.0, 15.0, 3.0)
    assert (
        values["total"] == 10 * 6.0 + 4 * 15.0 + 2 * 3.0
    )  # before steps 0, 4, 8 and at the end; after step 5 and at the end
    assert estimates.times(run_of(), tmp_path / "metrics.jsonl")["total"] == 10 * 6.0 + 3.0
    # Played ahead, a step is as long as the slower side: 3 seconds of rollout, or 3 of training.
    ahead = estimates.times(evolve(config, async_generation_ratio=1), tmp_path)
    assert (ahead["step"], ahead["one_after_the_other"]) == (3.0, 6.0)


@pytest.mark.parametrize("text", [None, "not json\n", '{"step": 0}\n'])
def test_a_run_without_times_is_an_error_in_one_line(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--from .*Fix: the output_dir of a run"):
        estimates.times(run_of(), tmp_path)
