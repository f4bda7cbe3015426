"""Two ranks that share a model by FSDP2 compute what one process does; every case runs here alone and once on two real ranks.

As a script this file is one of two ranks: `test_torch_fsdp.py RANK FOLDER PHASE`, PHASE `first` or `resumed`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import Lora, LossChoice, Objective, Offer, Ranks, TrainContext
from turnwise.data.dealing import deal, gather, merge_results
from turnwise.data.rows import Rows, Update
from turnwise.errors import CheckpointError, TrainerError
from turnwise.testing.synthetic import training_rows
from turnwise_torch import lora
from turnwise_torch.broadcast import Member
from turnwise_torch.config import FsdpConfig, TorchConfig
from turnwise_torch.fixtures import tiny_model, tiny_vision_model
from turnwise_torch.models import VALUE_HEAD_FILE
from turnwise_torch.state import STATE_FILE
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import receive
from turnwise_torch.vision import Vision

VOCABULARY = 50
SIZES = (4, 2, 1, 3, 2)
"""Groups of the updates: their micro-batches differ in number, also between the ranks."""


@frozen
class Case:
    """A strategy by the changes to its context, and its options."""

    changes: Mapping[str, Any]
    config: TorchConfig = field(factory=lambda: TorchConfig(betas=(0.9, 0.95)))
    tied: bool = True


def packed(budget: int) -> dict[str, Any]:
    return {"use_sequence_packing": True, "max_tokens_per_microbatch_in_train": budget, "max_tokens_per_microbatch_in_infer": budget}


DOUBLE: dict[str, Any] = {"dtype": "fp64"}
CASES = {
    "tied": Case(DOUBLE),
    "untied": Case(DOUBLE, tied=False),
    "budget, checkpointing, chunks": Case(
        {**DOUBLE, "max_tokens_per_microbatch_in_train": 60, "gradient_checkpointing": True},
        TorchConfig(logits_chunk=3, fsdp=FsdpConfig(reduce_every_microbatch=True)),
    ),
    "packed, kept gathered": Case({**DOUBLE, **packed(90)}, TorchConfig(fsdp=FsdpConfig(reshard_after_forward=False))),
    "offloaded": Case({"dtype": "fp32"}, TorchConfig(fsdp=FsdpConfig(cpu_offload=True))),
    "critic": Case({**DOUBLE, "head": "value", "role": "critic"}),
    "a frozen part": Case({**DOUBLE, "frozen": ("model.embed_tokens", "layers.0.")}),
    "bf16": Case({"dtype": "bf16", "gradient_checkpointing": True}),
    "adapters": Case({**DOUBLE, "lora": Lora(4, 8, "all-linear"), "gradient_checkpointing": True}, tied=False),
}

ALONE = Case({**DOUBLE, "lora": Lora(4, 8, "all-linear", "adapter"), "bucket_bytes": 2000}, tied=False)


def update(number: int) -> Update:
    """An update with every column; seeds give other rows."""
    rows = training_rows(SIZES[number], seed=number, vocabulary=VOCABULARY)
    count = int(rows.response_mask.sum())
    draw = np.random.default_rng(number)
    noise = {name: -np.log(VOCABULARY) + 0.3 * draw.normal(size=count) for name in ("old_log_probs", "ref_log_probs")}
    columns = {**rows.columns, **noise, "advantages": draw.normal(size=count), "returns": draw.normal(size=count)}
    columns["coef"] = columns["coef"] * (draw.random(count) > 0.2)
    return Update(evolve(rows, columns=columns), lr=1e-3 * (1 - 0.1 * number), entropy_coef=0.01, kl_coef=0.1)


def picture_update(folder: Path) -> Update:
    """Two samples: one with a picture, one without, so that of two ranks one has no image."""
    vision = Vision(folder / "vision")
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    prompt = [1, 52, *[50] * vision.tokens(picture), 53, 3]
    mask = np.array([*[False] * len(prompt), True, True, False, False, True, True, True])
    numbers = {name: np.zeros(5, np.int64) for name in ("sample", "turn", "trajectory")}
    columns = {"coef": np.full(5, 0.2), "weight": np.ones(5), "advantages": np.linspace(-1, 1, 5), "old_log_probs": np.full(5, np.nan), **numbers}
    ids = np.array([*prompt, 4, 5, 9, 10, 12, 13, 14], np.int32)
    return Update(Rows(ids, np.array([0, len(prompt) + 2, len(ids)]), mask, columns, ((picture,), ())), lr=1e-3)


def seen(strategy: TorchStrategy, update: Update, share: np.ndarray) -> dict[str, Any]:
    result = strategy.update(evolve(update, rows=update.rows.select(share)))
    return {"norm": result.grad_norm, "weights": {n: t.clone() for n, t in strategy.weights()}}


def build(case: Case, folder: Path, ranks: Ranks | None = None) -> TorchStrategy:
    options: dict[str, Any] = {
        "model": folder / ("tied" if case.tied else "untied"),
        "role": "actor_train",
        "gradient_checkpointing": False,
        "temperature": 0.7,
        "objective": Objective(LossChoice("ppo"), value_clip=None),
        "per_device_train_batch_size": 2,
        "infer_batch_size": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "ranks": ranks or Ranks(),
    }
    return TorchStrategy(case.config, TrainContext(**{**options, **case.changes}))


def outcome(strategy: TorchStrategy, share: Callable[[Rows], np.ndarray], numbers: Sequence[int] = range(5)) -> dict[str, Any]:
    """Results of updates on this rank's share of their rows, its answers afterwards, and the whole weights."""
    results = []
    for number in numbers:
        given = update(number)
        results.append(strategy.update(evolve(given, rows=given.rows.select(share(given.rows)))))
    rows = update(0).rows
    ask = strategy.values if strategy.context.head == "value" else strategy.logprobs
    mine = ask(rows.select(share(rows)))
    nobody = ask(rows.select(share(rows)[:1]) if strategy.context.ranks.rank else rows.select(np.zeros(0, np.int64)))
    return {"results": results, "answers": mine, "few": len(nobody), "weights": {n: t.clone() for n, t in strategy.weights()}}


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
    started = start(folder, "first")
    assert [rank.returncode for rank in started] == [-signal.SIGKILL] * 2, told(folder, "first")
    return found(folder, "first")


@pytest.fixture(scope="module")
def resumed(folder: Path, ranks: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What two new ranks found that went on from the killed ones' state."""
    started = start(folder, "resumed")
    assert [rank.returncode for rank in started] == [0, 0], told(folder, "resumed")
    return found(folder, "resumed")


def start(folder: Path, phase: str) -> list[subprocess.Popen[bytes]]:
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(2):
        with (folder / f"{phase}-{rank}.log").open("wb") as log:
            command = [sys.executable, "-W", "error", __file__, str(rank), str(folder), phase]
            started.append(subprocess.Popen(command, env=quiet, stdout=log, stderr=subprocess.STDOUT))
    try:
        for rank in started:
            rank.wait(timeout=150)
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
    return started


def told(folder: Path, phase: str) -> str:
    return "\n".join((folder / f"{phase}-{rank}.log").read_text()[-3000:] for rank in range(2))


def found(folder: Path, phase: str) -> dict[str, list[Any]]:
    of_rank = [torch.load(folder / f"{phase}-{rank}.pt", weights_only=False) for rank in range(2)]
    return {name: [of[name] for of in of_rank] for name in of_rank[0]}


@pytest.mark.parametrize("name", CASES)
def test_five_updates_with_varying_micro_batches_are_those_of_one_process(folder: Path, ranks: dict[str, list[Any]], name: str) -> None:
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


def test_masters_are_sharded_in_float32_whatever_is_computed_in(ranks: dict[str, list[Any]]) -> None:
    for rank in ranks["bf16 masters"]:
        assert rank["dtypes"] == {"torch.float32"}
        assert rank["share"] == pytest.approx(0.5, abs=0.05)


def test_a_reference_is_sharded_without_an_optimizer(folder: Path, ranks: dict[str, list[Any]]) -> None:
    rows = update(0).rows
    alone = build(Case({"dtype": "bf16", "trainable": False, "role": "reference"}), folder)
    got = ranks["reference"]
    assert [rank["dtypes"] for rank in got] == [{"torch.bfloat16"}] * 2
    np.testing.assert_allclose(gather(rows, deal(rows, 2), [rank["answers"] for rank in got]), alone.logprobs(rows), rtol=0, atol=1e-2)


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
        torch.testing.assert_close(adapted(input_ids=ids).logits, strategy.model(input_ids=ids).logits, rtol=0, atol=1e-6)


def test_a_backend_that_does_not_come_leaves_no_rank_behind(ranks: dict[str, list[Any]]) -> None:
    pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'turnwise-torch[lora]'")
    first, second = ranks["adapters alone"]
    assert first["failed"] == "weight update: 0 of 1 backends came"
    assert second["failed"] == ""


def test_an_export_is_a_model_folder_written_once(folder: Path, ranks: dict[str, list[Any]]) -> None:
    expected = ranks["untied"][0]["weights"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "untied out", dtype=torch.float64)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    if "adapters" in ranks:
        assert (folder / "adapters out" / "adapter" / "adapter_model.safetensors").is_file()
    head = load_file(folder / "critic out" / VALUE_HEAD_FILE)
    assert head["weight"].shape == (1, 32)
    assert head["weight"].norm() > 0


def test_a_folder_that_cannot_be_read_or_written_is_told_on_every_rank(ranks: dict[str, list[Any]]) -> None:
    for rank in ranks["told"]:
        assert rank["missing"].startswith("/nowhere is not a model folder")
        assert "cannot write the training state to" in rank["blocked"]
        assert "there is no training state in" in rank["empty"]
        assert "was saved by one process, this run has 2" in rank["single"]
        assert "was saved with head 'lm', this run has 'value'" in rank["critic"]
        assert "\n" not in "".join(rank.values())


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


def test_damaged_parts_are_told_in_one_line(folder: Path, ranks: dict[str, list[Any]], tmp_path: Path) -> None:
    for file in (folder / "state").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: None if file.name == "state.json" else 10])
    with pytest.raises(CheckpointError, match=r"is cut short or damaged: .* Fix: resume from an older checkpoint") as caught:
        build(CASES["tied"], folder).load(tmp_path)
    assert "\n" not in str(caught.value)


def test_parts_of_another_model_are_told(folder: Path, ranks: dict[str, list[Any]], tmp_path: Path) -> None:
    small = tiny_model(tmp_path, vocab_size=VOCABULARY + 1)
    with pytest.raises(CheckpointError, match="belongs to another model than"):
        build(Case({**DOUBLE, "model": small}), folder).load(folder / "state")


# ---------------------------------------------------------------- one of two ranks


class Rank:
    """Builds strategies one after the other, each meeting the other rank at an address of its own."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.meetings = rank, folder, 0

    def build(self, case: Case) -> TorchStrategy:
        self.meetings += 1
        place = self.folder / f"meeting {self.meetings} {os.environ['PHASE']}"
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                place.with_suffix(".new").write_text(f"127.0.0.1:{free.getsockname()[1]}")
            place.with_suffix(".new").rename(place)
        while not place.exists():
            threading.Event().wait(0.01)
        return build(case, self.folder, Ranks(self.rank, 2, self.rank, place.read_text()))

    def share(self, rows: Rows) -> np.ndarray:
        return deal(rows, 2)[self.rank]


def first(me: Rank) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.changes.get("lora") and importlib.util.find_spec("peft") is None:
            continue
        strategy = me.build(case)
        out[name] = outcome(strategy, me.share)
        if name in ("untied", "critic", "adapters"):
            strategy.export(me.folder / f"{name} out")
        if name == "bf16":
            masters = strategy.optimizer.masters.values()  # type: ignore[union-attr]
            held = sum(m.to_local().numel() for m in masters) / sum(m.numel() for m in masters)  # type: ignore[attr-defined]
            out["bf16 masters"] = {"dtypes": {str(m.dtype) for m in masters}, "share": held}
        if name == "offloaded":
            strategy.offload()
            strategy.onload()
            strategy.update(update(0))
        strategy.close()
    out["reference"] = reference(me)
    strategy = me.build(Case({**DOUBLE, "model": me.folder / "vision"}))
    out["images"] = seen(strategy, picture_update(me.folder), np.array([me.rank]))
    strategy.close()
    out["stream"] = stream(me)
    if importlib.util.find_spec("peft") is not None:
        out["adapters alone"] = adapters_alone(me)
    out["told"] = failures(me)
    strategy = me.build(CASES["tied"])
    strategy.save(me.folder / "state at the start")
    outcome(strategy, me.share, (0, 1, 2))
    strategy.save(me.folder / "state")
    noise = torch.rand(3)
    out["whole"] = {"noise": noise, **outcome(strategy, me.share, (3, 4))}
    torch.save(out, me.folder / f"first-{me.rank}.pt")
    strategy._step = lambda lr: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    strategy.update(update(0))
    raise AssertionError("it should not live")


def reference(me: Rank) -> dict[str, Any]:
    strategy = me.build(Case({"dtype": "bf16", "trainable": False, "role": "reference"}))
    assert strategy.optimizer is None
    out = {"answers": strategy.logprobs(update(0).rows.select(me.share(update(0).rows)))}
    out["dtypes"] = {str(p.dtype) for p in strategy.model.parameters()}  # type: ignore[assignment]
    strategy.save(me.folder / "reference")
    strategy.load(me.folder / "reference")
    strategy.close()
    return out


def stream(me: Rank) -> dict[str, torch.Tensor]:
    strategy = me.build(Case({"dtype": "bf16", "bucket_bytes": 5000}))
    ways = {"shared_memory": receive, "process_group": Member(torch.device("cpu")).receive}
    assert strategy.transports == (*ways, "safetensors")
    reads = [read(strategy, strategy.offer(transport, 1), way) for transport, way in ways.items()]
    strategy.close()
    if me.rank:
        return {}
    one, other = reads
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    return one


def adapters_alone(me: Rank) -> dict[str, Any]:
    """What a backend on rank 0's host reads; then one that does not come, after which all ranks still meet."""
    strategy = me.build(ALONE)
    outcome(strategy, me.share, (0, 1))
    offers = []
    reads = {}
    for transport, way in {"shared_memory": receive, "process_group": Member(torch.device("cpu")).receive}.items():
        offers.append(strategy.offer(transport, 1))
        reads[transport] = read(strategy, offers[-1], way)
    offers.append(strategy.offer("safetensors", 1))
    if me.rank == 0:
        reads["safetensors"] = load_file(Path(offers[-1].payload["folder"]) / lora.ADAPTER_WEIGHTS)
        shutil.copytree(offers[-1].payload["folder"], me.folder / "adapters alone")
    strategy.context = evolve(strategy.context, weight_sync_timeout=0.2)
    failed = ""
    try:
        strategy.send(strategy.offer("shared_memory", 2))
    except TrainerError as error:
        failed = str(error).partition(",")[0]
    outcome(strategy, me.share, (2,))
    strategy.close()
    return {"read": {} if me.rank else reads, "configs": [offer.adapter for offer in offers], "failed": failed}


def read(strategy: TorchStrategy, offer: Offer, way: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """What a reader gets of a stream: on rank 0, which has one."""
    got: dict[str, torch.Tensor] = {}
    reader = threading.Thread(target=lambda: got.update({name: t.clone() for bucket in way(offer.payload, 30) for name, t in bucket}))
    if strategy.context.ranks.rank == 0:
        reader.start()
    strategy.send(offer)
    if strategy.context.ranks.rank == 0:
        reader.join()
    return got


def failures(me: Rank) -> dict[str, str]:
    def told_by(act: Callable[[], Any]) -> str:
        with pytest.raises(CheckpointError) as caught:
            act()
        return str(caught.value)

    blocked = me.folder / f"a file {me.rank}"
    blocked.write_text("")
    out = {}
    with pytest.raises(CheckpointError) as caught:
        me.build(Case({"dtype": "fp32", "model": Path("/nowhere")}))
    out["missing"] = str(caught.value)
    torch.distributed.destroy_process_group()
    actor = me.build(Case({"dtype": "fp32"}))
    out["blocked"] = told_by(lambda: actor.save(blocked / "below"))
    out["empty"] = told_by(lambda: actor.load(me.folder))
    single = me.folder / f"single {me.rank}"
    single.mkdir()
    (single / STATE_FILE).write_bytes(b"")
    out["single"] = told_by(lambda: actor.load(single))
    actor.save(me.folder / "actor")
    actor.close()
    critic = me.build(Case({"dtype": "fp32", "head": "value"}))
    out["critic"] = told_by(lambda: critic.load(me.folder / "actor"))
    critic.close()
    return out


def be_resumed(me: Rank) -> dict[str, Any]:
    strategy = me.build(CASES["tied"])
    strategy.load(me.folder / "state at the start")
    strategy.load(me.folder / "state")
    out = {"whole": {"noise": torch.rand(3), **outcome(strategy, me.share, (3, 4))}}
    strategy.close()
    torch.save(out, me.folder / f"resumed-{me.rank}.pt")
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["PHASE"] = sys.argv[3]
    {"first": first, "resumed": be_resumed}[sys.argv[3]](Rank(int(sys.argv[1]), Path(sys.argv[2])))
