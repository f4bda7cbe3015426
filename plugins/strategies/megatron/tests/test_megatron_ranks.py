"""Two and four gloo ranks of the real Megatron: five updates against plain torch under each parallel form, resume,
streams, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import LossChoice, Objective
from turnwise.data.dealing import deal, gather, merge_results
from turnwise.data.rows import Update
from turnwise.pipeline.aggregation import MODES, token_coefficients
from turnwise.plugins import registry
from turnwise_torch.config import TorchConfig
from turnwise_torch.strategy import TorchStrategy

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ADAM = {"betas": (0.9, 0.95), "eps": 1e-6}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True, "use_distributed_optimizer": False, "recompute_granularity": "full"}
EXPERT = {"expert_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
TWO: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "tensor": ("llama", False, TENSOR),
    "sequence": ("qwen3", False, SEQUENCE),
    "pipeline": ("qwen2", True, PIPELINE),
    "data": ("qwen2", True, {}),
    "context": ("qwen3", True, {"context_parallel_size": 2}),
    "expert": ("qwen3_moe", False, EXPERT),
}
FOUR: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "tensor-pipeline": ("qwen2", True, {**TENSOR, **PIPELINE}),
    "sequence-pipeline": ("qwen3", False, {**SEQUENCE, **PIPELINE}),
    "sequence-context": ("llama", True, {**SEQUENCE, "context_parallel_size": 2}),
    "context-pipeline": ("qwen2", True, {**PIPELINE, "context_parallel_size": 2}),
    "data-tensor": ("qwen2", True, {**TENSOR, "recompute_granularity": "selective"}),
    "data-pipeline": ("llama", False, {**PIPELINE, "use_distributed_optimizer": False}),
    "expert-tensor": ("qwen3_moe", False, {**SEQUENCE, **EXPERT, "expert_tensor_parallel_size": 1}),
    "expert-tensor-parts": ("qwen3_moe", True, {**TENSOR, "sequence_parallel": True, **EXPERT}),
    "expert-pipeline": ("qwen3_moe", False, {**EXPERT, **PIPELINE}),
    "expert-context": ("qwen3_moe", True, {**EXPERT, "context_parallel_size": 2, "recompute_granularity": "full"}),
    "expert-data": ("qwen3_moe", False, {**EXPERT, "use_distributed_optimizer": False}),
    "data-context": ("qwen3", True, {"context_parallel_size": 2, "engine_args": {"overlap_grad_reduce": True}}),
}


def trained(lab: Any, folder: Path, size: int, forms: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What the ranks and what plain torch make of each form."""
    models = {name: lab.make_model(folder / f"model-{name}", family, tied) for name, (family, tied, _) in forms.items()}
    updates, rows = lab.five_updates(), lab.make_rows(11, 6)
    cases = {
        name: {
            "context": lab.context_of(models[name]),
            "updates": updates,
            "rows": rows,
            "config": {**ADAM, **config},
            **more.get(name, {}),
        }
        for name, (_, _, config) in forms.items()
    }
    reported = lab.start_ranks(folder, size, cases)
    plain = {name: lab.plain_training(model, updates) for name, model in models.items()}
    return {"folder": folder, "reported": reported, "plain": plain, "models": models, "rows": rows}


@pytest.fixture(scope="module")
def two(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    more = {
        "tensor": {"resume": True, "other": PIPELINE, "broken": True},
        "data": {"resume": True, "other": {"use_distributed_optimizer": False}, "broken": True},
        "expert": {"broken": True, "resume": True, "other": {}, "sent": True, "exported": True},
        "sequence": {"resume": True, "other": TENSOR, "sent": True},
        "pipeline": {"broken": True, "resume": True, "other": TENSOR, "sent": True, "exported": True},
        "context": {"resume": True, "other": {}},
    }
    return trained(lab, tmp_path_factory.mktemp("two"), 2, TWO, **more)


@pytest.fixture(scope="module")
def four(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    more = {
        "tensor-pipeline": {"sent": True, "exported": True},
        "expert-tensor-parts": {"sent": True, "exported": True},
        "expert-pipeline": {"sent": True, "exported": True, "resume": True, "other": {}},
        "expert-data": {"resume": True, "other": EXPERT},
    }
    return trained(lab, tmp_path_factory.mktemp("four"), 4, FOUR, **more)


@pytest.mark.parametrize("name", ["tensor", "data", "expert", "pipeline"])
def test_no_rank_makes_a_step_where_one_has_a_loss_that_is_not_finite(two: dict[str, Any], name: str) -> None:
    found = [each[name]["skipped"] for each in two["reported"]]
    assert [(result.skipped, stays) for result, stays in found] == [(True, True)] * 2


def by_data_rank(run: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """What the first process of each data parallel rank reported."""
    reported = [each[name] for each in run["reported"]]
    size = reported[0]["data_parallel"][1]
    return [next(each for each in reported if each["data_parallel"] == (rank, size)) for rank in range(size)]


def check_training(run: dict[str, Any], name: str) -> None:
    plain, ranks = run["plain"][name], by_data_rank(run, name)
    results = [merge_results(parts) for parts in zip(*(each["results"] for each in ranks))]
    np.testing.assert_allclose([result.loss for result in results], plain["losses"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose([result.grad_norm for result in results], plain["norms"], rtol=1e-5)
    assert all(norm > 0.5 for norm in plain["norms"][:3]), "clipping must show"
    after = run["reported"][0][name]["after"]
    assert after.keys() == plain["after"].keys()
    for key, expected in plain["after"].items():
        np.testing.assert_allclose(after[key], expected, atol=1e-4, rtol=0, err_msg=key)
        if "embed" not in key and "lm_head" not in key:
            assert (expected - plain["before"][key]).abs().max() > 1e-3, (
                f"{key} did not move, so the comparison says nothing"
            )
    for reported in run["reported"]:  # every process of a data parallel rank gets the whole answer
        mine = ranks[reported[name]["data_parallel"][0]]
        assert [r.loss for r in reported[name]["results"]] == [r.loss for r in mine["results"]]
        assert [dict(r.sums) for r in reported[name]["results"]] == [dict(r.sums) for r in mine["results"]]


def check_log_probs(lab: Any, run: dict[str, Any], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(run["models"][name], dtype=torch.float32)
    with torch.no_grad():
        expected = lab.plain_log_probs(model, run["rows"])[0].numpy()
    ranks = by_data_rank(run, name)
    got = gather(run["rows"], deal(run["rows"], len(ranks)), [each["before"] for each in ranks])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TWO)
def test_five_updates_of_two_ranks_are_those_of_plain_torch(two: dict[str, Any], name: str) -> None:
    check_training(two, name)


@pytest.mark.parametrize("name", TWO)
def test_log_probs_of_two_ranks_are_those_of_transformers(lab: Any, two: dict[str, Any], name: str) -> None:
    check_log_probs(lab, two, name)


@pytest.mark.parametrize("name", TWO)
def test_a_folder_comes_back_bit_by_bit_on_the_first_rank_alone(two: dict[str, Any], name: str) -> None:
    first, *others = (reported[name]["weights"] for reported in two["reported"])
    expected = two["plain"][name]["before"]
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[key], expected[key]) for key in expected)
    assert not any(others)


def test_ranks_wait_for_each_other_as_long_as_the_configuration_says(two: dict[str, Any]) -> None:
    assert [reported["waits"] for each in two["reported"] for reported in each.values()] == [{300.0}] * 2 * len(TWO)


@pytest.mark.parametrize("name", TWO)
def test_resuming_is_exact_and_another_layout_is_refused_in_one_line(two: dict[str, Any], name: str) -> None:
    check_resuming(two, name)


def check_resuming(run: dict[str, Any], name: str) -> None:
    for reported in (each[name] for each in run["reported"]):
        for again, before in zip(reported["resumed"], reported["results"][3:]):
            assert (again.loss, again.grad_norm, dict(again.sums)) == (before.loss, before.grad_norm, dict(before.sums))
        assert all(torch.equal(reported["resumed_weights"][key], tensor) for key, tensor in reported["after"].items())
        assert "is of the layout" in reported["refused"]
        assert "Fix: the parallel sizes of that run" in reported["refused"]
        assert "\n" not in reported["refused"]


@pytest.mark.parametrize("name", ["sequence", "pipeline", "expert"])
def test_a_backend_receives_the_whole_model_in_buckets(two: dict[str, Any], name: str) -> None:
    reported = two["reported"][0][name]
    assert reported["sent"].keys() == two["plain"][name]["after"].keys()
    assert all(torch.equal(reported["sent"][key], tensor) for key, tensor in reported["after"].items())


@pytest.mark.parametrize("name", ["pipeline", "expert"])
def test_an_export_is_a_folder_that_transformers_loads(lab: Any, two: dict[str, Any], name: str) -> None:
    folder = two["folder"] / name / "export"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    after = two["reported"][0][name]["after"]
    assert all(torch.equal(tensor, after[key]) for key, tensor in lab.checkpoint_names(model.state_dict()).items())
    assert (folder / "tokenizer.json").is_file()
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (
        name == "expert"
    )  # tied: the embedding serves


def test_ranks_that_share_experts_send_each_layer_whole(lab: Any, two: dict[str, Any]) -> None:
    order = [_layer(name) for name in two["reported"][0]["expert"]["sent"]]
    assert [layer for layer, before in zip(order, [None, *order]) if layer != before and layer is not None] == [
        "0",
        "1",
    ]


def _layer(name: str) -> str | None:
    return name.split(".")[2] if name.startswith("model.layers.") else None


@pytest.mark.matrix
@pytest.mark.parametrize("name", FOUR)
def test_five_updates_of_four_ranks_are_those_of_plain_torch(lab: Any, four: dict[str, Any], name: str) -> None:
    check_training(four, name)
    check_log_probs(lab, four, name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tensor-pipeline", "expert-tensor-parts", "expert-pipeline"])
def test_an_export_of_four_ranks_is_the_model(lab: Any, four: dict[str, Any], name: str) -> None:
    reported = four["reported"][0][name]
    model = AutoModelForCausalLM.from_pretrained(four["folder"] / name / "export", dtype=torch.float32)
    assert all(
        torch.equal(tensor, reported["after"][key]) for key, tensor in lab.checkpoint_names(model.state_dict()).items()
    )
    assert reported["sent"].keys() == reported["after"].keys()
    assert all(torch.equal(reported["sent"][key], tensor) for key, tensor in reported["after"].items())


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["expert-pipeline", "expert-data"])
def test_resuming_four_ranks_that_share_experts_is_exact(four: dict[str, Any], name: str) -> None:
    check_resuming(four, name)


def aggregated(update: Update) -> list[Update]:
    """The update with the coefficients of every aggregation mode; it moves nothing."""
    columns = update.rows.columns
    owner, rows = columns["sample"], np.arange(len(update.rows))
    first, lengths = np.unique(owner, return_index=True)[1], np.bincount(owner)
    made = [
        token_coefficients(
            mode, "trajectory", rows, columns["trajectory"][first], columns["weight"][first], lengths, 30.0
        )
        for mode in MODES
    ]
    return [evolve(update, rows=evolve(update.rows, columns={**columns, "coef": coef[owner]}), lr=0.0) for coef in made]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "config", [SEQUENCE, {"context_parallel_size": 2}, PIPELINE, {}], ids=["sequence", "context", "pipeline", "data"]
)
def test_every_loss_under_every_aggregation_is_the_same_objective(
    lab: Any, qwen2: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    names = [entry.name for entry in registry().entries("policy_loss") if entry.distribution == "turnwise-losses"]
    updates = aggregated(lab.five_updates()[0])
    objectives = {
        f"{name}-{ratio}": Objective(LossChoice(name), ratio_type=ratio)
        for name in names
        for ratio in ("token", "segment")
    }
    case = {
        "context": lab.context_of(qwen2),
        "updates": [],
        "silent": updates,
        "objectives": objectives,
        "config": config,
    }
    reported = lab.start_ranks(tmp_path, 2, {"losses": case})
    for name, objective in objectives.items():
        plain = TorchStrategy(TorchConfig(), lab.context_of(qwen2, objective=objective))
        parts = zip(*(each["objectives"][name] for each in by_data_rank({"reported": reported}, "losses")))
        for mode, update, got in zip(MODES, updates, map(merge_results, parts), strict=True):
            expected, where = plain.update(update), f"{name} {mode}"
            np.testing.assert_allclose(
                [got.loss, got.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-4, atol=1e-6, err_msg=where
            )
            for key, pair in expected.sums.items():
                np.testing.assert_allclose(got.sums[key], pair, rtol=1e-4, atol=1e-5, err_msg=f"{where} {key}")


@pytest.mark.matrix
def test_experts_in_bf16_have_nearly_the_gradients_of_fp32_and_resume_exactly(lab: Any, tmp_path: Path) -> None:
    model, updates = lab.make_model(tmp_path / "model", "qwen3_moe", False), lab.five_updates()
    case = {
        "context": lab.context_of(model, dtype="bf16"),
        "updates": updates,
        "config": {**ADAM, **EXPERT},
        "sent": True,
    }
    reported = lab.start_ranks(tmp_path, 2, {"bf16": {**case, "resume": True, "other": {}}})
    np.testing.assert_allclose(
        [r.grad_norm for r in reported[1]["bf16"]["results"]], lab.plain_training(model, updates)["norms"], rtol=0.05
    )
    check_resuming({"reported": reported}, "bf16")
    first = reported[0]["bf16"]
    assert all(
        tensor.dtype == torch.bfloat16 and torch.equal(first["sent"][key], tensor)
        for key, tensor in first["after"].items()
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "config",
    [SEQUENCE, {"context_parallel_size": 2}, PIPELINE, EXPERT],
    ids=["sequence", "context", "pipeline", "expert"],
)
def test_a_critic_on_two_ranks_is_that_of_strategy_torch(
    lab: Any, qwen2: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    model = lab.make_model(tmp_path / "model", "qwen3_moe", False) if config is EXPERT else qwen2
    context = lab.context_of(
        model, role="critic", head="value", objective=Objective(LossChoice("vanilla"), value_clip=0.2)
    )
    updates = lab.five_updates()
    case = {
        "context": context,
        "updates": updates,
        "config": {**ADAM, **config},
        "rows": lab.make_rows(11, 6),
        "exported": True,
    }
    reported = lab.start_ranks(tmp_path, 2, {"critic": case})
    critic = TorchStrategy(TorchConfig(**ADAM), context)
    results = [critic.update(update) for update in updates]
    np.testing.assert_array_equal(reported[0]["critic"]["before"], 0)
    parts = zip(*(each["results"] for each in by_data_rank({"reported": reported}, "critic")))
    for got, expected in zip(map(merge_results, parts), results):
        np.testing.assert_allclose([got.loss, got.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-4, atol=1e-6)
    exported = TorchStrategy(TorchConfig(), lab.context_of(tmp_path / "critic" / "export", role="critic", head="value"))
    np.testing.assert_allclose(exported.values(case["rows"]), critic.values(case["rows"]), atol=1e-4)
