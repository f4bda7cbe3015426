"""Two ranks that share a model by FSDP2 compute what one process does; every case runs here alone and once on two real
ranks."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise.data.dealing import deal, gather, merge_results
from turnwise.errors import CheckpointError
from turnwise.testing.ranks import run_ranks
from turnwise_torch import lora
from turnwise_torch.fixtures import tiny_model, tiny_vision_model
from turnwise_torch.models import VALUE_HEAD_FILE

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_worker import (
    ALONE,
    CASES,
    DOUBLE,
    MODES,
    OBJECTIVES,
    VOCABULARY,
    Case,
    build,
    objectives,
    outcome,
    picture_update,
    seen,
    update,
)

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, tied and untied, and what the ranks write."""
    folder = tmp_path_factory.mktemp("fsdp")
    for name in ("tied", "untied"):
        tiny_model(folder / name, vocab_size=VOCABULARY, tied=name == "tied")
    tiny_vision_model(folder / "vision")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Any]]:
    """What two ranks found, by case, one after the other; the last thing that they do is to be killed in an update."""
    codes, said = start(folder, "first")
    assert codes == [-signal.SIGKILL] * 2, said
    return found(folder, "first")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process finds under every objective, from where the ranks are after five updates."""
    strategy = build(CASES["tied"], folder)
    outcome(strategy, lambda rows: np.arange(len(rows)))
    return objectives(strategy, lambda rows: np.arange(len(rows)))


@pytest.fixture(scope="module")
def resumed(folder: Path, ranks: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What two new ranks found that went on from the killed ones' state."""
    codes, said = start(folder, "resumed")
    assert codes == [0, 0], said
    return found(folder, "resumed")


def start(folder: Path, phase: str) -> tuple[list[int], str]:
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run_ranks(
        lambda rank: [sys.executable, "-W", "error", str(WORKER), str(rank), str(folder), phase],
        2,
        folder / f"logs {phase}",
        environment=quiet,
    )


def found(folder: Path, phase: str) -> dict[str, list[Any]]:
    of_rank = [torch.load(folder / f"{phase}-{rank}.pt", weights_only=False) for rank in range(2)]
    return {name: [of[name] for of in of_rank] for name in of_rank[0]}


def test_no_rank_makes_a_step_where_one_has_a_loss_that_is_not_finite(
    folder: Path, ranks: dict[str, list[Any]]
) -> None:
    one, other = ranks["skipped"]
    assert [found["result"].skipped for found in (one, other)] == [True, True]
    assert [np.isfinite(found["result"].loss) for found in (one, other)] == [True, False]
    assert one["stays"]
    assert other["stays"]
    assert merge_results([one["result"], other["result"]]).skipped
    expected = build(CASES["tied"], folder).update(update(0))
    assert one["norm"] == other["norm"] == pytest.approx(expected.grad_norm, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_five_updates_with_varying_micro_batches_are_those_of_one_process(
    folder: Path, ranks: dict[str, list[Any]], name: str
) -> None:
    case = CASES[name]
    if case.changes.get("lora"):
        pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'turnwise-torch[lora]'")
    strategy = build(case, folder)
    before = {n: t.clone() for n, t in strategy.weights()}
    alone = outcome(strategy, lambda rows: np.arange(len(rows)))
    rough = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 3e-2}[case.changes["dtype"]]
    for number, expected in enumerate(alone["results"]):
        got = merge_results([rank["results"][number] for rank in ranks[name]])
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=rough)
        assert got.loss == pytest.approx(expected.loss, rel=rough, abs=rough)
        assert got.sums.keys() == expected.sums.keys()
        for metric, pair in expected.sums.items():
            assert got.sums[metric] == pytest.approx(pair, rel=rough, abs=10 * rough), metric
    rows = update(0).rows
    answers = gather(rows, deal(rows, 2), [rank["answers"] for rank in ranks[name]])
    np.testing.assert_allclose(answers, alone["answers"], rtol=0, atol=max(1e-6, 3 * rough))
    assert ranks[name][0]["few"] == 0
    for rank in ranks[name]:
        assert list(rank["weights"]) == list(alone["weights"])
        for tensor, weight in alone["weights"].items():
            assert rank["weights"][tensor].dtype == weight.dtype
            torch.testing.assert_close(rank["weights"][tensor], weight, rtol=0, atol=max(rough, 1e-9))
    if case.changes["dtype"] != "bf16":
        moved = {n: float((alone["weights"][n] - before[n]).abs().max()) for n in before}
        still = {
            "a frozen part": {n for n in moved if "embed" in n or "lm_head" in n or "layers.0." in n},
            "adapters": {n for n in moved if not n.endswith("_proj.weight")},
        }
        assert {n for n, by in moved.items() if by == 0} == still.get(name, set())


@pytest.mark.parametrize("name", [f"{objective} {mode}" for objective in OBJECTIVES for mode in MODES])
def test_every_loss_under_every_aggregation_is_the_same_objective(
    ranks: dict[str, list[Any]], alone: Any, name: str
) -> None:
    got, expected = merge_results([rank[name] for rank in ranks["objectives"]]), alone[name]
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-7)
    assert got.loss == pytest.approx(expected.loss, rel=1e-7, abs=1e-9)
    assert {key: pytest.approx(pair, rel=1e-7, abs=1e-7) for key, pair in got.sums.items()} == dict(expected.sums)


def test_ranks_wait_for_each_other_as_long_as_the_configuration_says(ranks: dict[str, list[Any]]) -> None:
    assert ranks["waits"] == [{140.0}] * 2


def test_masters_are_sharded_in_float32_whatever_is_computed_in(ranks: dict[str, list[Any]]) -> None:
    for rank in ranks["bf16 masters"]:
        assert rank["dtypes"] == {"torch.float32"}
        assert rank["share"] == pytest.approx(0.5, abs=0.05)


def test_a_reference_is_sharded_without_an_optimizer(folder: Path, ranks: dict[str, list[Any]]) -> None:
    rows = update(0).rows
    alone = build(Case({"dtype": "bf16", "trainable": False, "role": "reference"}), folder)
    got = ranks["reference"]
    assert [rank["dtypes"] for rank in got] == [{"torch.bfloat16"}] * 2
    np.testing.assert_allclose(
        gather(rows, deal(rows, 2), [rank["answers"] for rank in got]), alone.logprobs(rows), rtol=0, atol=1e-2
    )


def test_a_rank_without_images_trains_beside_one_with_some(folder: Path, ranks: dict[str, list[Any]]) -> None:
    alone = seen(build(Case({**DOUBLE, "model": folder / "vision"}), folder), picture_update(folder), np.arange(2))
    for rank in ranks["images"]:
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-9)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-7)


def test_weights_stream_from_rank_0_in_buckets_under_every_name(folder: Path, ranks: dict[str, list[Any]]) -> None:
    sent = ranks["stream"][0]
    alone = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.bfloat16)
    assert sent.keys() == alone.state_dict().keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in alone.state_dict().items())
    assert ranks["stream"][1] == {}


def test_adapters_alone_are_those_of_one_process_by_every_transport(folder: Path, ranks: dict[str, list[Any]]) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'turnwise-torch[lora]'")
    strategy = build(ALONE, folder)
    outcome(strategy, lambda rows: np.arange(len(rows)), (0, 1))
    expected = lora.adapter_tensors(strategy.model, lambda tensor: tensor)
    first, second = ranks["adapters alone"]
    assert first["read"].keys() == {"shared_memory", "process_group", "safetensors"}
    for got in first["read"].values():
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-9)
    assert second["read"] == {}
    assert first["configs"] == second["configs"] == [strategy.offer("safetensors", 1).adapter] * 3
    base = AutoModelForCausalLM.from_pretrained(folder / "untied", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapters alone", autocast_adapter_dtype=False)
    ids = torch.from_numpy(update(0).rows.input_ids[: update(0).rows.offsets[1]].astype(np.int64))[None]
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=ids).logits, strategy.model(input_ids=ids).logits, rtol=0, atol=1e-6
        )


def test_a_backend_that_does_not_come_leaves_no_rank_behind(ranks: dict[str, list[Any]]) -> None:
    pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'turnwise-torch[lora]'")
    first, second = ranks["adapters alone"]
    assert first["failed"] == "weight update: 0 of 1 backends came"
    assert second["failed"] == ""


def test_an_export_is_a_model_folder_written_once(folder: Path, ranks: dict[str, list[Any]]) -> None:
    expected = ranks["untied"][0]["weights"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "untied out", dtype=torch.float64)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    for name, dtype in {"untied": "float64", "bf16": "bfloat16"}.items():
        assert json.loads((folder / f"{name} out" / "config.json").read_text())["dtype"] == dtype
    if "adapters" in ranks:
        assert (folder / "adapters out" / "adapter" / "adapter_model.safetensors").is_file()
    head = load_file(folder / "critic out" / VALUE_HEAD_FILE)
    assert head["weight"].shape == (1, 32)
    assert head["weight"].norm() > 0


def test_a_folder_that_cannot_be_read_or_written_is_reported_on_every_rank(ranks: dict[str, list[Any]]) -> None:
    for rank in ranks["failures"]:
        assert rank["missing"].startswith("/nowhere is not a model folder")
        assert "cannot write the training state to" in rank["blocked"]
        assert "there is no training state in" in rank["empty"]
        assert "was saved by one process, this run has 2" in rank["single"]
        assert "was saved with head 'lm', this run has 'value'" in rank["critic"]
        assert "damaged" not in rank["critic"]
        assert "\n" not in "".join(rank.values())
    first, second = (rank["memory"] for rank in ranks["failures"])
    assert first.startswith("out of memory, in loading the model of actor_train. Fix: ")
    assert second == "actor_train: rank 0 could not load the model: MemoryError: no room"


def test_killed_ranks_resume_to_the_last_bit(ranks: dict[str, list[Any]], resumed: dict[str, list[Any]]) -> None:
    for before, after in zip(ranks["whole"], resumed["whole"], strict=True):
        assert torch.equal(before["noise"], after["noise"])
        assert [(r.loss, r.grad_norm) for r in before["results"]] == [(r.loss, r.grad_norm) for r in after["results"]]
        assert np.array_equal(before["answers"], after["answers"])
        assert all(torch.equal(after["weights"][name], tensor) for name, tensor in before["weights"].items())


def test_what_two_ranks_saved_one_process_continues(folder: Path, ranks: dict[str, list[Any]]) -> None:
    strategy = build(CASES["tied"], folder)
    strategy.load(folder / "state")
    alone = outcome(strategy, lambda rows: np.arange(len(rows)), (3, 4))
    got = merge_results([rank["results"][-1] for rank in ranks["whole"]])
    assert alone["results"][-1].grad_norm == pytest.approx(got.grad_norm, rel=1e-9)
    for name, tensor in ranks["whole"][0]["weights"].items():
        torch.testing.assert_close(alone["weights"][name], tensor, rtol=0, atol=1e-9)


def test_damaged_parts_are_reported_in_one_line(folder: Path, ranks: dict[str, list[Any]], tmp_path: Path) -> None:
    for file in (folder / "state").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: None if file.name == "state.json" else 10])
    with pytest.raises(
        CheckpointError, match=r"is cut short or damaged: .* Fix: resume from an older checkpoint"
    ) as caught:
        build(CASES["tied"], folder).load(tmp_path)
    assert "\n" not in str(caught.value)


def test_parts_of_another_model_are_reported(folder: Path, ranks: dict[str, list[Any]], tmp_path: Path) -> None:
    small = tiny_model(tmp_path, vocab_size=VOCABULARY + 1)
    with pytest.raises(CheckpointError, match=r"^the training state in \S+ belongs to another model than"):
        build(Case({**DOUBLE, "model": small}), folder).load(folder / "state")
