"""Saving and loading a strategy's state, and exporting its weights."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import LossChoice, Objective
from turnwise.data.rows import Update
from turnwise.errors import CheckpointError
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.models import VALUE_HEAD_FILE, load_value_model
from turnwise_torch.parts import FACTS_FILE, FORMAT
from turnwise_torch.state import STATE_FILE
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import Planted

Build = Callable[..., TorchStrategy]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loaded_strategy_continues_to_the_last_bit(build: Build, update: Update, tmp_path: Path, dtype: str) -> None:
    one = build(dtype=dtype)
    for lr in (1e-3, 2e-3):
        one.update(evolve(update, lr=lr))
    one.save(tmp_path / "state")
    noise = torch.rand(3)
    two = build(dtype=dtype)
    two.load(tmp_path / "state")
    assert torch.equal(torch.rand(3), noise)
    for lr in (5e-4, 3e-3):
        a, b = one.update(evolve(update, lr=lr)), two.update(evolve(update, lr=lr))
        assert (a.loss, a.grad_norm, dict(a.sums)) == (b.loss, b.grad_norm, dict(b.sums))
    assert np.array_equal(one.logprobs(update.rows), two.logprobs(update.rows))


def test_saving_before_the_first_update_is_undone_exactly_too(build: Build, update: Update, tmp_path: Path) -> None:
    one, two = build(), build()
    one.save(tmp_path)
    two.update(update)
    two.load(tmp_path)
    assert one.update(update).loss == two.update(update).loss
    assert np.array_equal(one.logprobs(update.rows), two.logprobs(update.rows))


def test_loading_changes_the_shared_module_in_place(build: Build, update: Update, tmp_path: Path) -> None:
    strategy = build()
    strategy.save(tmp_path)
    before = strategy.logprobs(update.rows)
    addresses = [p.data_ptr() for p in strategy.model.parameters()]
    strategy.update(update)
    assert not np.array_equal(strategy.logprobs(update.rows), before)
    strategy.load(tmp_path)
    assert np.array_equal(strategy.logprobs(update.rows), before)
    assert [p.data_ptr() for p in strategy.model.parameters()] == addresses


def test_a_reference_is_saved_and_loaded_without_an_optimizer(build: Build, update: Update, tmp_path: Path) -> None:
    one = build(trainable=False, objective=None)
    one.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [STATE_FILE]
    two = build(trainable=False, objective=None)
    with torch.no_grad():
        two.model.lm_head.weight.zero_()
    two.load(tmp_path)
    assert np.array_equal(one.logprobs(update.rows), two.logprobs(update.rows))


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_state_is_reported_in_one_line_and_changes_nothing(
    build: Build, update: Update, tmp_path: Path, damage: str
) -> None:
    strategy = build()
    strategy.save(tmp_path)
    file = tmp_path / STATE_FILE
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-100], "garbage": b"\xff" * 200, "empty": b""}[damage])
    before = strategy.logprobs(update.rows)
    with pytest.raises(CheckpointError, match="is cut short or damaged") as caught:
        strategy.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert np.array_equal(strategy.logprobs(update.rows), before)


def test_a_state_that_is_not_there_is_reported(build: Build, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no training state in"):
        build().load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bf16"}, r"saved with dtype 'fp32', this run has 'bf16'"),
        ({"head": "value"}, r"saved with head 'lm', this run has 'value'"),
    ],
)
def test_a_state_of_another_configuration_is_reported(
    build: Build, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    build().save(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        build(**changes).load(tmp_path)


def test_a_state_of_another_model_is_reported(build: Build, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "model", vocab_size=60)
    build(model=other).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"belongs to another model than .*\. Fix: "):
        build().load(tmp_path / "state")


def test_a_place_that_cannot_be_written_is_reported_in_one_line(build: Build, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    strategy = build()
    for write in (strategy.save, strategy.export):
        with pytest.raises(CheckpointError, match="cannot write the") as caught:
            write(blocked / "below")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_a_model_folder_with_the_tokenizers_files(
    build: Build, update: Update, tmp_path: Path, tied: bool
) -> None:
    source = tiny_model(tmp_path / "source", tied=tied)
    (source / "tokenizer.json").write_text('{"some": "tokenizer"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    strategy = build(model=source, gradient_checkpointing=True)
    strategy.update(update)
    strategy.export(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"some": "tokenizer"}'
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (name, p), (_, q) in zip(strategy.model.named_parameters(), loaded.named_parameters()):
        assert torch.equal(p, q), name
    assert np.array_equal(build(model=tmp_path / "out").logprobs(update.rows), strategy.logprobs(update.rows))


def test_an_export_of_a_sharded_folder_copies_no_old_weights(build: Build, folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    build(model=source).export(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names
    assert not names & {"pytorch_model.bin", "pytorch_model.bin.index.json"}


def test_an_exported_critic_keeps_its_head(build: Build, update: Update, tmp_path: Path) -> None:
    critic = build(head="value", objective=Objective(LossChoice("ppo")))
    n = len(update.rows.columns["coef"])
    columns = {**update.rows.columns, "coef": np.full(n, 1 / n), "returns": np.ones(n)}
    critic.update(Update(evolve(update.rows, columns=columns), lr=1e-2))
    critic.export(tmp_path)
    assert (tmp_path / VALUE_HEAD_FILE).is_file()
    assert torch.equal(load_value_model(tmp_path, "fp32", "sdpa").value_head.weight, critic.model.value_head.weight)
    assert np.array_equal(build(model=tmp_path, head="value").values(update.rows), critic.values(update.rows))


@pytest.mark.parametrize("deep", [False, True])
def test_a_state_in_parts_that_would_run_code_is_refused_before_it_does(
    build: Build, tmp_path: Path, deep: bool
) -> None:
    strategy, ran = build(), tmp_path / "ran"
    facts = {"format": FORMAT, "head": "lm", "dtype": "fp32", "trainable": "True", "lora": "none"}
    (tmp_path / FACTS_FILE).write_text(json.dumps(facts))
    planted = Metadata({"master/x": Planted(ran)}) if deep else Planted(ran)  # type: ignore[dict-item]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(planted))
    with pytest.raises(
        CheckpointError, match=r"names .*touch, which no training state does, and was not read\. Fix: "
    ) as caught:
        strategy.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert not ran.exists()
