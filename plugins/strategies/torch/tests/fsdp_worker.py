"""One of two ranks that share models by FSDP2, and what it shares with the tests: `fsdp_worker.py RANK FOLDER PHASE`,
PHASE `first` or `resumed`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen
from safetensors.torch import load_file

from turnwise.contracts.train import Lora, LossChoice, Objective, Offer, Ranks, TrainContext
from turnwise.data.dealing import deal
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import CheckpointError, TrainerError
from turnwise.pipeline.aggregation import MODES, token_coefficients
from turnwise.plugins import registry
from turnwise.ports import free_port
from turnwise.testing.synthetic import training_rows
from turnwise_torch import lora, models
from turnwise_torch.broadcast import Member
from turnwise_torch.config import FsdpConfig, TorchConfig
from turnwise_torch.objective import build_loss
from turnwise_torch.sending import Sending
from turnwise_torch.state import STATE_FILE
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import receive
from turnwise_torch.testing import collective_timeouts, packed
from turnwise_torch.vision import Vision

VOCABULARY = 50
RATIOS: tuple[Literal["token", "segment"], ...] = ("token", "segment")
SIZES = (4, 2, 1, 3, 2)
"""Groups of the updates: their micro-batches differ in number, also between the ranks."""


@frozen
class Case:
    """A strategy by the changes to its context, and its options."""

    changes: Mapping[str, Any]
    config: TorchConfig = field(factory=lambda: TorchConfig(betas=(0.9, 0.95)))
    tied: bool = True


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
    columns = {
        "coef": np.full(5, 0.2),
        "weight": np.ones(5),
        "advantages": np.linspace(-1, 1, 5),
        "old_log_probs": np.full(5, np.nan),
        **numbers,
    }
    ids = np.array([*prompt, 4, 5, 9, 10, 12, 13, 14], np.int32)
    return Update(Rows(ids, np.array([0, len(prompt) + 2, len(ids)]), mask, columns, ((picture,), ())), lr=1e-3)


def seen(strategy: TorchStrategy, update: Update, share: np.ndarray) -> dict[str, Any]:
    result = strategy.update(evolve(update, rows=update.rows.select(share)))
    return {"norm": result.grad_norm, "weights": {n: t.clone() for n, t in strategy.weights()}}


LOSSES = sorted(entry.name for entry in registry().entries("policy_loss") if entry.plugin == "losses")
OBJECTIVES = {f"{loss} {ratio}": Objective(LossChoice(loss), ratio_type=ratio) for ratio in RATIOS for loss in LOSSES}


def silent() -> list[Update]:
    """An update that moves nothing, once with the coefficients of every aggregation mode."""
    given = update(1)
    draw, columns = np.random.default_rng(0), dict(given.rows.columns)
    count, rows = len(columns["coef"]), np.arange(len(given.rows))
    columns |= {name: draw.normal(size=count) for name in ("trajectory_advantages", "scores")}
    columns["infer_log_probs"] = columns["old_log_probs"] + 0.1 * draw.normal(size=count)
    owner = np.repeat(rows, np.diff(np.concatenate([[0], np.cumsum(given.rows.response_mask)])[given.rows.offsets]))
    lengths = np.bincount(owner, minlength=len(rows))
    trajectory = np.array([columns["trajectory"][owner == row][0] for row in rows])
    made = [
        token_coefficients(mode, "trajectory", rows, trajectory, np.ones(len(rows)), lengths, scale=30.0)[owner]
        for mode in MODES
    ]
    return [evolve(given, rows=evolve(given.rows, columns={**columns, "coef": coef}), lr=0.0) for coef in made]


def objectives(strategy: TorchStrategy, share: Callable[[Rows], np.ndarray]) -> dict[str, UpdateResult]:
    """What the silent updates report under every loss and ratio, in every aggregation mode."""
    out, updates = {}, list(zip(MODES, silent(), strict=True))
    for name, objective in OBJECTIVES.items():
        strategy.context, strategy.loss = evolve(strategy.context, objective=objective), build_loss(objective)
        for mode, given in updates:
            out[f"{name} {mode}"] = strategy.update(evolve(given, rows=given.rows.select(share(given.rows))))
    return out


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
        "runtime_timeout": 140.0,
    }
    return TorchStrategy(case.config, TrainContext(**{**options, **case.changes}))


def outcome(
    strategy: TorchStrategy, share: Callable[[Rows], np.ndarray], numbers: Sequence[int] = range(5)
) -> dict[str, Any]:
    """Results of updates on this rank's share of their rows, its answers afterwards, and the whole weights."""
    results = []
    for number in numbers:
        given = update(number)
        results.append(strategy.update(evolve(given, rows=given.rows.select(share(given.rows)))))
    rows = update(0).rows
    ask = strategy.values if strategy.context.head == "value" else strategy.logprobs
    mine = ask(rows.select(share(rows)))
    nobody = ask(rows.select(share(rows)[:1]) if strategy.context.ranks.rank else rows.select(np.zeros(0, np.int64)))
    return {
        "results": results,
        "answers": mine,
        "few": len(nobody),
        "weights": {n: t.clone() for n, t in strategy.weights()},
    }


class Rank:
    """Builds strategies one after the other, each meeting the other rank at an address of its own."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.meetings = rank, folder, 0

    def build(self, case: Case) -> TorchStrategy:
        self.meetings += 1
        place = self.folder / f"meeting {self.meetings} {os.environ['PHASE']}"
        if self.rank == 0:
            place.with_suffix(".new").write_text(f"127.0.0.1:{free_port()}")
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
        if name in ("untied", "critic", "adapters", "bf16"):
            strategy.export(me.folder / f"{name} out")
        if name == "bf16":
            masters = strategy.optimizer.masters.values()  # type: ignore[union-attr]
            held = sum(m.to_local().numel() for m in masters) / sum(m.numel() for m in masters)  # type: ignore[attr-defined]
            out["bf16 masters"] = {"dtypes": {str(m.dtype) for m in masters}, "share": held}
        if name == "tied":
            out["waits"] = set(collective_timeouts())
            out["objectives"] = objectives(strategy, me.share)
        if name == "offloaded":
            strategy.offload()
            strategy.onload()
            strategy.update(update(0))
        strategy.close()
    out["reference"] = reference(me)
    strategy = me.build(Case({**DOUBLE, "model": me.folder / "vision"}))
    out["images"] = seen(strategy, picture_update(me.folder), np.array([me.rank]))
    strategy.close()
    out["skipped"] = skipped(me)
    out["stream"] = stream(me)
    if importlib.util.find_spec("peft") is not None:
        out["adapters alone"] = adapters_alone(me)
    out["failures"] = failures(me)
    strategy = me.build(CASES["tied"])
    strategy.save(me.folder / "state at the start")
    outcome(strategy, me.share, (0, 1, 2))
    strategy.save(me.folder / "state")
    noise = torch.rand(3)
    out["whole"] = {"noise": noise, **outcome(strategy, me.share, (3, 4))}
    torch.save(out, me.folder / f"first-{me.rank}.pt")
    strategy.optimizer.step = lambda lr: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
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


def skipped(me: Rank) -> dict[str, Any]:
    """Of two ranks the second alone has a loss that is not finite."""
    strategy = me.build(CASES["tied"])
    before, given = {n: t.clone() for n, t in strategy.weights()}, update(0)
    rows = given.rows.select(me.share(given.rows))
    broken = {**rows.columns, "advantages": np.full(len(rows.columns["coef"]), np.nan)}
    result = strategy.update(evolve(given, rows=evolve(rows, columns=broken) if me.rank else rows))
    stays = all(torch.equal(tensor, before[name]) for name, tensor in strategy.weights())
    again = strategy.update(evolve(given, rows=rows))
    strategy.close()
    return {"result": result, "stays": stays, "norm": again.grad_norm}


def stream(me: Rank) -> dict[str, torch.Tensor]:
    strategy = me.build(Case({"dtype": "bf16", "bucket_bytes": 5000}))
    ways = {"shared_memory": receive, "process_group": Member(torch.device("cpu")).receive}
    assert strategy.transports(strategy.config, strategy.context) == (*ways, "safetensors")
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
    strategy.sending.close()
    strategy.sending = Sending(evolve(strategy.context, weight_sync_timeout=0.2), strategy.device, strategy)
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
    reader = threading.Thread(
        target=lambda: got.update({name: t.clone() for bucket in way(offer.payload, 30) for name, t in bucket})
    )
    if strategy.context.ranks.rank == 0:
        reader.start()
    strategy.send(offer)
    if strategy.context.ranks.rank == 0:
        reader.join()
    return got


def no_memory(*_: Any) -> Any:
    """In place of the loading of a model, which rank 0 alone does."""
    raise MemoryError("no room")


def failures(me: Rank) -> dict[str, str]:
    def message_of(act: Callable[[], Any]) -> str:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load_causal_lm", no_memory)
        with pytest.raises(TrainerError) as unforeseen:
            me.build(Case({"dtype": "fp32"}))
    out["memory"] = str(unforeseen.value)
    torch.distributed.destroy_process_group()
    actor = me.build(Case({"dtype": "fp32"}))
    out["blocked"] = message_of(lambda: actor.save(blocked / "below"))
    out["empty"] = message_of(lambda: actor.load(me.folder))
    single = me.folder / f"single {me.rank}"
    single.mkdir()
    (single / STATE_FILE).write_bytes(b"")
    out["single"] = message_of(lambda: actor.load(single))
    actor.save(me.folder / "actor")
    actor.close()
    critic = me.build(Case({"dtype": "fp32", "head": "value"}))
    out["critic"] = message_of(lambda: critic.load(me.folder / "actor"))
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
